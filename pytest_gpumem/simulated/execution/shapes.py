"""Output shapes remembered: a model of many equal layers computes each of them once.

Most meta kernels are Python and cost far more than the bookkeeping around them. What an operator
returns depends on its arguments' sizes, strides and types and on its other arguments; where that
has been seen, equal outputs are made directly, and an in-place operator is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import META

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.storages import Storages

MOST_SHAPES = 50_000

_NUMBERS = frozenset({int, float, bool, complex})

_MORE_THAN_TYPES = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and (value.is_complex or str(value).startswith("torch.q"))
)
"""Complex tensors may be conjugated, and quantized ones have scales."""

_empty_strided = torch.empty_strided
_Generator = torch._C.Generator
"""What ``torch.Generator`` is while nothing replaces it."""
_Make = Callable[[tuple[Any, ...]], Any]

NEW: Any = object()
"""Stands for what nobody knows yet: how an operator answers arguments of a new kind."""


class UnknownError(Exception):
    """An argument or result that cannot be described by value."""


class Shapes:
    """What operators returned, by the description of their arguments."""

    def __init__(self, storages: Storages, place: Callable[[torch.Tensor], str]) -> None:
        self._known: dict[Any, _Make | None] = {}
        self._kinds: dict[Any, tuple[bool, Callable[[Any], Any]]] = {}
        """Of each operator: whether it writes, and how its arguments are described."""
        self._of = storages.of
        self._place = place

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Describe the arguments, ``None`` if that cannot be, and say how the results are made.

        That is ``NEW`` or a function of ``args``; ``None`` if the operator has to be run each time.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = func._schema.is_mutable, self._describing(func)
        is_mutable, describe = kind
        try:
            key = (
                func,
                torch.get_default_dtype(),
                describe(args),
                describe(kwargs) if kwargs else None,
            )
            if is_mutable and _has_values(args):
                # CPU tensors are real: writing to them must happen.
                return None, NEW
            return key, self._known.get(key, NEW)
        except (UnknownError, TypeError):
            return None, NEW

    def learn(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what an operator returned for arguments described by ``key``."""
        make = None
        # unsqueeze_ and its relatives write to the tensor's own shape: they must run each time.
        if torch.Tag.inplace_view not in key[0].tags:
            with suppress(UnknownError):
                make = recipe(result, args, storages_in((args, kwargs)))
        if len(self._known) >= MOST_SHAPES:
            self._known.clear()
        self._known[key] = make

    def _describing(self, func: Any) -> Callable[[Any], Any]:
        if is_of_lists(func):
            # Element by element: of numbers, which an optimizer has new ones of in each step,
            # only the type counts.
            return self._describe_by_class
        return self._describe

    def _describe_by_class(self, value: Any) -> Any:
        if value.__class__ in _NUMBERS:
            return value.__class__
        if isinstance(value, (list, tuple)):
            return tuple([self._describe_by_class(item) for item in value])
        return self._describe(value)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if dtype in _MORE_THAN_TYPES or value.layout is not torch.strided:
                raise UnknownError
            where = True if self._of(value) is not None else self._place(value)
            return value.shape, value.stride(), dtype, where
        if isinstance(value, (list, tuple)):
            return tuple([self._describe(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._describe(item)) for name, item in value.items()])
        if isinstance(value, _Generator):
            return None
        # True == 1 == 1.0, but they promote differently.
        return value.__class__, value


def is_of_lists(func: Any) -> bool:
    """Whether ``func`` takes lists of tensors, and does the same to one element after the other."""
    return bool(func._schema.name.startswith("aten::_foreach_"))


def _has_values(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not raw.is_meta(value):
                return True
        elif isinstance(value, (list, tuple)) and _has_values(value):
            return True
    return False


def storages_in(value: Any) -> set[int]:
    """The keys of all storages in ``value``."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict)):
        return {key for item in items for key in storages_in(item)}
    return set()


def recipe(result: Any, args: tuple[Any, ...], inputs: set[int]) -> _Make:
    """Say how ``result`` is made anew from ``args``; ``inputs`` are the arguments' storages.

    Raises ``UnknownError`` where only running the operator makes one.
    """
    if result is None or isinstance(result, (int, float, str)):
        return lambda args: result
    if args and result is args[0]:
        return lambda args: args[0]
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise UnknownError
        if result.untyped_storage()._cdata in inputs:
            # A view whose schema does not say so (_unsafe_view): only running it makes one.
            raise UnknownError
        return _tensor_recipe(result)
    if isinstance(result, (list, tuple)):
        if args and isinstance(args[0], (list, tuple)) and _same(result, args[0]):
            return lambda args: args[0]
        makes = [recipe(item, (), inputs) for item in result]
        kind = type(result)
        return lambda args: kind([make(()) for make in makes])
    raise UnknownError


def _same(results: Any, inputs: Any) -> bool:
    return len(results) == len(inputs) > 0 and all(
        a is b for a, b in zip(results, inputs, strict=True)
    )


def _tensor_recipe(tensor: torch.Tensor) -> _Make:
    if (
        not raw.is_meta(tensor)
        or tensor.layout is not torch.strided
        or tensor.storage_offset()
        or type(tensor) is not torch.Tensor
    ):
        raise UnknownError
    size, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    probe = _empty_strided(size, stride, dtype=dtype, device=META)
    if probe.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
        raise UnknownError
    return lambda args: _empty_strided(size, stride, dtype=dtype, device=META)
