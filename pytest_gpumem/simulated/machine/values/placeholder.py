"""Results of reading unknown numbers: fit for logging and printing, and for nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpumem.values.errors import UnknownValueError

if TYPE_CHECKING:
    import torch  # the plugin uses these types, and starts without it

VALUE = 0.0
"""The placeholder, with which loss scaling and logging continue: the loss is finite."""

_HARMLESS = frozenset({"json.encoder", "torch.optim._adafactor", "yaml.representer"})
"""Modules whose comparisons of numbers affect no memory: encoders look for NaN and infinities
to write them, and torch's Adafactor clamps with ``max`` (torch 2.6 to 2.15)."""

_DECODERS = (
    "tiktoken.core",
    "transformers.tokenization_utils_fast",  # up to 4
    "transformers.tokenization_utils_tokenizers",
    "transformers.tokenization_mistral_common",
)
"""Modules that pass tokens to compiled code that makes text of them."""


class _AsFloat(type):
    """A metaclass by which tables by type, such as ``torch.testing`` has, find ``float``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is float

    def __hash__(cls) -> int:
        return hash(float)


class PlaceholderFloat(float, metaclass=_AsFloat):
    """0.0 in place of a number that was not computed.

    It can be printed, stored and computed with, and so can results of it. Comparing it, or asking
    whether it is true, raises :class:`UnknownValueError`: control flow and assertions would
    otherwise depend on a made-up number.
    """

    __slots__ = ()
    __hash__ = float.__hash__


class PlaceholderInt:
    """0 in place of an integer that was not computed.

    It behaves as :class:`PlaceholderFloat`, and cannot be an index, a size or a count. It is no
    ``int``, whose value compiled code reads directly; only decoders of text may call ``__index__``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "0"

    def __format__(self, form: str) -> str:
        return format(0, form)

    def __index__(self) -> int:
        if sys._getframe(1).f_globals.get("__name__") in _DECODERS:
            return 0
        raise _refusal("an index", "an integer of a tensor")

    def __reduce__(self) -> tuple[type[PlaceholderInt], tuple[()]]:
        return PlaceholderInt, ()


def _refusal(shown: str, read: str) -> UnknownValueError:
    # Imported late: the plugin uses these types, and starts without torch.
    from pytest_gpumem.simulated.common.callsite import user_line

    return UnknownValueError(
        f"{shown} of {read} at {user_line()} depends on a value of a CUDA tensor, which a "
        f"simulated GPU does not have: only shapes are computed"
    )


def _define(kind: type, name: str, function: Callable[..., Any]) -> None:
    function.__name__ = name
    setattr(kind, name, function)


def _refuse(name: str, shown: str) -> None:
    """Make both types refuse the method ``name``, as far as :class:`float` has it."""
    compare = getattr(float, name, None)

    def of_float(*operands: Any) -> Any:
        if compare is not None and sys._getframe(1).f_globals.get("__name__") in _HARMLESS:
            return compare(*operands)
        raise _refusal(shown, "an item()")

    def of_integer(*operands: Any) -> Any:
        raise _refusal(shown, "an integer of a tensor")

    if name not in ("__hash__", "__float__"):
        _define(PlaceholderFloat, name, of_float)
    if name not in ("__trunc__", "__floor__", "__ceil__"):
        _define(PlaceholderInt, name, of_integer)


def _keep_placeholder(name: str) -> None:
    """Make the results of the operation ``name`` placeholders again."""
    operation = getattr(float, name)

    def of_float(*operands: Any) -> Any:
        try:
            result = operation(*operands)
        except ZeroDivisionError:
            result = VALUE
        if isinstance(result, int):
            return PlaceholderInt()
        return PlaceholderFloat(result) if isinstance(result, float) else result

    def of_integer(number: PlaceholderInt, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, PlaceholderInt)) for other in others):
            return NotImplemented
        divides = name in ("__truediv__", "__rtruediv__")
        is_float = divides or any(isinstance(other, float) for other in others)
        return PlaceholderFloat() if is_float else number

    _define(PlaceholderFloat, name, of_float)
    _define(PlaceholderInt, name, of_integer)


_REFUSED = {
    "__bool__": "bool()",
    "__eq__": "==",
    "__ne__": "!=",
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
    "__hash__": "hash()",
    "__float__": "float()",
    # Python's integers cannot show that they are made up.
    **{f"__{name}__": f"{name}()" for name in ("int", "trunc", "floor", "ceil")},
}
for _name, _shown in _REFUSED.items():
    _refuse(_name, _shown)
for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ "
    "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __round__"
).split():
    _keep_placeholder(_name)


def dots(tensor: torch.Tensor, device: torch.device) -> str:
    """Return the printed form of a ``tensor`` on ``device`` whose numbers are unknown."""
    try:
        node = tensor.grad_fn
        graph = f", grad_fn=<{type(node).__name__}>" if node is not None else ""
    except RuntimeError:  # a view whose base was overwritten in a way that has no graph
        graph = ", grad_fn=<Invalid>"
    graph = graph or (", requires_grad=True" if tensor.requires_grad else "")
    shape = tuple(tensor.shape)
    return f"tensor(..., device='{device}', size={shape}, dtype={tensor.dtype}{graph})"


def placeholder_integers(shape: Sequence[int]) -> list[Any]:
    """Return the ``tolist()`` of a tensor of ``shape``, with a placeholder for each integer."""
    if len(shape) == 1:
        return [PlaceholderInt() for _ in range(shape[0])]
    return [placeholder_integers(shape[1:]) for _ in range(shape[0])]
