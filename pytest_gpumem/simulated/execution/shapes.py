"""Output shapes remembered: a model of many equal layers computes each of them once.

Most meta kernels are Python and cost far more than the bookkeeping around them. An operator's
results depend on its arguments' sizes, strides and types and on its other arguments; where these
were seen, equal outputs are made directly, and an in-place operator is not run again. Results
of torch's own operators are shared by all machines of a process: tests run the same model
repeatedly, each on a machine of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, storage_key
from pytest_gpumem.simulated.operators import tables

MOST_SHAPES = 50_000

TORCHS_OWN = frozenset({"aten", "prim", "prims"})
"""Namespaces of operators that are no library's."""

_NUMBERS = frozenset({int, float, bool, complex})

_PLAIN = _NUMBERS | {
    *(str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
}
"""Types of values that may be remembered for as long as the process runs."""

_MORE_THAN_TYPES = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and (value.is_complex or str(value).startswith("torch.q"))
)
"""Complex tensors may be conjugated, and quantized ones have scales."""

_Generator = torch._C.Generator
"""The class ``torch.Generator`` while nothing replaces it."""
_Make = Callable[[Args], Any]
_Known = dict[Any, "_Make | None"]

NEW: Any = object()
"""A marker of unknown results: of an operator on arguments of a new kind."""


class UnknownError(Exception):
    """An argument or result that cannot be described by value."""


_everywhere: dict[Any, _Known] = {}
"""Results of torch's own operators, by the property that makes machines alike."""


class Shapes:
    """Results of operators, by the description of their arguments.

    ``alike`` is the property of machines on which torch's own operators return the same.
    """

    def __init__(
        self, storages: Storages, place: Callable[[torch.Tensor], str], alike: Hashable = None
    ) -> None:
        self._of_machine: _Known = {}
        self._everywhere = _everywhere.setdefault(alike, {})
        self._kinds: dict[Any, tuple[bool, Callable[[Any], Any], _Known]] = {}
        """By operator: whether it writes, how its arguments are described, the known results."""
        self._of = storages.of
        self._users_own = storages.users_own
        self._place = place

    def find(self, func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Return the description of the arguments, or ``None``, and a maker of the results.

        That is ``NEW`` or a function of ``args``; ``None`` if the operator has to be run each time.
        """
        kind = self._kinds.get(func)
        if kind is None:
            known = self._everywhere if _is_alike(func) else self._of_machine
            kind = self._kinds[func] = (
                func._schema.is_mutable,
                # Of a number in a list only the type counts: an optimizer has new ones in each
                # step.
                self._describe_by_class if is_of_lists(func) else self._describe,
                known,
            )
        is_mutable, describe, known = kind
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
            return key, known.get(key, NEW)
        except (UnknownError, TypeError):
            return None, NEW

    def learn(self, key: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Remember the result of an operator for arguments described by ``key``."""
        make = None
        # unsqueeze_ and its relatives write to the tensor's own shape: they must run each time.
        if torch.Tag.inplace_view not in key[0].tags:
            with suppress(UnknownError):
                make = recipe(result, args, storages_in((args, kwargs)))
        *_, known = self._kinds[key[0]]
        if len(known) >= MOST_SHAPES:
            known.clear()
        known[key] = make

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
            where = True if self._of(value) is not None else self._elsewhere(value)
            return value.shape, value.stride(), dtype, where
        if isinstance(value, (list, tuple)):
            return tuple([self._describe(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._describe(item)) for name, item in value.items()])
        if isinstance(value, _Generator):
            return None
        # True == 1 == 1.0, but they promote differently.
        kind = value.__class__
        if kind not in _PLAIN:
            raise UnknownError
        return kind, value

    def _elsewhere(self, tensor: torch.Tensor) -> Any:
        place = self._place(tensor)
        if place == "cpu" and tensor.dim():  # its values may decide
            raise UnknownError
        return (place, storage_key(tensor) in self._users_own) if place == "meta" else place


def _is_alike(func: Any) -> bool:
    """Return whether machines that are alike can share the results of ``func``.

    Keys of ``_foreach_`` operators, of hundreds of tensors each, are dropped with their machine.
    """
    if func.namespace not in TORCHS_OWN or is_of_lists(func):
        return False
    rule = tables.rule_of(func)
    return rule is None or rule.shapes is None


def is_of_lists(func: Any) -> bool:
    """Return whether ``func`` takes lists of tensors, and runs element by element."""
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
    """Return the keys of all storages in ``value``."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict)):
        return {key for item in items for key in storages_in(item)}
    return set()


def recipe(result: Any, args: Args, inputs: set[int]) -> _Make:
    """Return a function that makes ``result`` from ``args``; ``inputs``: the arguments' storages.

    Raises ``UnknownError`` where only running the operator makes one.
    """
    if result is None or isinstance(result, (int, float, str)):
        return lambda args: result
    if args and result is args[0]:
        return lambda args: args[0]
    if isinstance(result, torch.Tensor):
        if (
            not raw.is_meta(result)
            or result.layout is not torch.strided
            # A view whose schema omits it (_unsafe_view): only running it makes one.
            or result.untyped_storage()._cdata in inputs
            or result.storage_offset()
            or type(result) is not torch.Tensor
            or torch._is_zerotensor(result)
        ):
            raise UnknownError
        size, stride, dtype = result.shape, result.stride(), result.dtype
        probe = raw.empty_strided(size, stride, dtype=dtype, device=raw.META)
        if probe.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            raise UnknownError
        return lambda args: raw.empty_strided(size, stride, dtype=dtype, device=raw.META)
    if isinstance(result, (list, tuple)):
        given = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if len(result) == len(given) > 0 and all(map(operator.is_, result, given)):
            return lambda args: args[0]
        makes = [recipe(item, (), inputs) for item in result]
        kind = type(result)
        return lambda args: kind([make(()) for make in makes])
    raise UnknownError
