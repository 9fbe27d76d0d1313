"""Facts about tensors of unknown values: all elements equal or bounded, or some infinite.

A mask of any size is known where every element of it is the same. Nothing is computed or kept for
each element.

Random integers are bounded: ``(labels != -100).sum()`` is known though no label was drawn.
``torch.randint(low, high, ...)`` holds integers from ``low`` to ``high - 1``, and so does a tensor
copied, cut or put together from such tensors, until something else is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from pytest_gpumem.simulated.common.raw import META, is_integer, tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.finite import Infinity
from pytest_gpumem.simulated.machine.values.operator import Operator

_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_ELEMENTWISE = _COMPARISONS.union(
    "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or "
    "bitwise_xor mul".split()
)
_COPYING = frozenset("clone _to_copy index_select cat stack flip roll repeat".split())
"""Operators whose results hold only elements of their first argument."""
_SAME = _COPYING.union("any all amax amin max min mean".split())
"""Operators whose results are the one value of their first argument, where it has no other."""
_COUNTING = frozenset({"sum", "count_nonzero"})
_SOURCES = {"aten::_to_copy": 0, "aten::copy_": 1}
"""Position of the argument that is copied."""


class Bounds(NamedTuple):
    """The least and the greatest integer that a tensor of ``dtype`` holds, both included."""

    dtype: torch.dtype
    least: int
    greatest: int


@dataclass(frozen=True)
class Fact:
    """A fact about the contents of a storage."""

    value: torch.Tensor | None = None
    """The value of every element, as a tensor of no dimensions on the CPU."""
    assumed: bool = False
    """Whether that value, or values kept of the storage, come from an assumption."""
    infinite: Infinity = Infinity.NONE
    """Whether the program has put infinities or NaN in it."""
    bounds: Bounds | None = None
    """The least and the greatest of its integers, where these are random."""


class ValueFacts:
    """The facts of one simulation, by the address of the storage they belong to."""

    def __init__(
        self,
        single: finite.Read,
        is_unknown_on_host: Callable[[torch.Tensor], bool],
        by_key: dict[int, Fact],
    ) -> None:
        self._single = single
        self._is_unknown_on_host = is_unknown_on_host
        self.by_key = by_key

    def of(self, tensor: torch.Tensor) -> Fact | None:
        """Return the fact about the storage of ``tensor``."""
        return self.by_key.get(storage_key(tensor)) if self.by_key else None

    def uniform(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of every element of ``tensor``, if it is the same and known."""
        fact = self.of(tensor)
        if fact is None or fact.value is None or fact.value.dtype != tensor.dtype:
            return None
        return fact.value

    def infinity(self, tensor: torch.Tensor) -> Infinity:
        """Return the kind of infinity or NaN that the program has put into ``tensor``."""
        fact = self.of(tensor)
        return Infinity.NONE if fact is None else fact.infinite

    def is_assumed(self, values: Iterable[Any]) -> bool:
        """Return whether a fact about a tensor among ``values`` comes from an assumption."""
        found = (self.of(tensor) for tensor in tensors_in(values))
        return any(fact is not None and fact.assumed for fact in found)

    def of_results(self, operator: Operator, args: Args, kwargs: Kwargs) -> Fact | None:
        """Return the fact about the results of ``operator`` that follows from its arguments."""
        given = [*args, *kwargs.values()]
        infinite = self._infinity_from_arguments(operator, args, kwargs)
        name = operator.name.removeprefix("aten::").removesuffix("_")
        known = self.by_key and [
            tensor for tensor in tensors_in(given) if storage_key(tensor) in self.by_key
        ]
        if not known and not (self.by_key and name in _ELEMENTWISE):
            bounds = _drawn(args) if name == "randint" else None
            return Fact(infinite=infinite, bounds=bounds) if infinite or bounds else None
        read = given[1:] if operator.overwrites else given
        found = list(map(self.infinity, tensors_in(read)))
        infinite = max(infinite, finite.passed_on(operator.name, found))
        value = bounds = None
        if not infinite and name in _ELEMENTWISE:
            value = self._elementwise(operator, name, args)
        elif not infinite and (name in _SAME or name in _COUNTING):
            value = self._of_equal(args[0])
            bounds = self._of_bounded(args[0]) if name in _COPYING else None
        fact = Fact(value, self.is_assumed(known), infinite, bounds)
        return None if fact == Fact() else fact

    def _infinity_from_arguments(self, operator: Operator, args: Args, kwargs: Kwargs) -> Infinity:
        """Return the kind of infinity that a number, or few numbers from the host, bring in."""
        infinite = Infinity.NONE
        if operator.fills:
            infinite = finite.infinity_from_numbers(self._single, operator.name, args, kwargs)
        at = _SOURCES.get(operator.name)
        if infinite or at is None or self._is_unknown_on_host(args[at]):
            return infinite
        return finite.held(args[at])

    def nonzero_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return ``nonzero`` of a mask whose elements are all equal: its shape, without values."""
        value = self.uniform(tensor)
        if value is None:
            return None
        count = tensor.numel() if value else 0
        device = META if count else torch.device("cpu")
        return torch.empty((count, tensor.dim()), dtype=torch.int64, device=device)

    def _of_equal(self, given: Any) -> torch.Tensor | None:
        """Return the one value of a tensor, or of all tensors of a list."""
        tensors = [given] if isinstance(given, torch.Tensor) else given
        found = [self.uniform(tensor) for tensor in tensors if tensor.numel()]
        first = found[0] if found else None
        if first is None or any(other is None or first != other for other in found):
            return None
        return first

    def _of_bounded(self, given: Any) -> Bounds | None:
        """Return the bounds of a tensor, or of all tensors of a list."""
        found = list(map(self._bounds, tensors_in(given)))
        known = [bounds for bounds in found if bounds is not None]
        if not known or len(known) < len(found):
            return None
        least, greatest = min(each.least for each in known), max(each.greatest for each in known)
        return Bounds(known[0].dtype, least, greatest)

    def _bounds(self, tensor: torch.Tensor) -> Bounds | None:
        fact = self.of(tensor)
        bounds = None if fact is None else fact.bounds
        return bounds if bounds and bounds.dtype is tensor.dtype else None

    def _elementwise(self, operator: Operator, name: str, args: Args) -> torch.Tensor | None:
        choices = [self._choices(value) for value in args]
        bounds = self._bounds(args[0]) if name in _COMPARISONS else None
        *_, number = args
        if bounds is not None and isinstance(number, (int, float)):
            # Between the bounds, a result can change only at the other number.
            numbers = {bounds.least, bounds.greatest}
            if bounds.least < number < bounds.greatest:
                numbers.add(int(number))
            choices[0] = [torch.tensor(each, dtype=bounds.dtype, device="cpu") for each in numbers]
        results = [
            # In-place operators write to a copy.
            operator.func(*(v.clone() if isinstance(v, torch.Tensor) else v for v in chosen))
            for chosen in product(*choices)
        ]
        if not results or any(bool(results[0] != other) for other in results):
            return None
        first: torch.Tensor = results[0]
        return first

    def _choices(self, value: Any) -> list[Any]:
        """Return the possible values of an element: for an unknown condition, both."""
        if not isinstance(value, torch.Tensor):
            return [value]
        uniform = self.uniform(value)
        if uniform is not None:
            return [uniform]
        if (single := self._single(value)) is not None:
            return [torch.tensor(single, dtype=value.dtype, device="cpu")]
        if value.dtype is torch.bool:
            return [torch.tensor(choice, device="cpu") for choice in (False, True)]
        return []


def of_result(operator: Operator, fact: Fact, source: Any, result: torch.Tensor) -> Fact:
    """Return ``fact`` about all results of ``operator`` as one about ``result``, of its type."""
    value = fact.value
    number = result.dtype.is_floating_point or result.dtype.is_complex
    infinite = fact.infinite if number else Infinity.NONE
    if value is None:
        return Fact(None, fact.assumed, infinite, _of_type(fact.bounds, result.dtype))
    name = operator.name.removeprefix("aten::")
    if name in _COUNTING and isinstance(source, torch.Tensor) and result.numel():
        each = value.ne(0) if name == "count_nonzero" else value
        value = each * (source.numel() // result.numel())
    return Fact(value.to(result.dtype), fact.assumed, infinite)


def _of_type(bounds: Bounds | None, dtype: torch.dtype) -> Bounds | None:
    """Return ``bounds`` of a tensor that was converted to ``dtype``."""
    if bounds is None or not is_integer(dtype):
        return None
    limits = torch.iinfo(dtype)
    fits = limits.min <= bounds.least and bounds.greatest <= limits.max
    return bounds._replace(dtype=dtype) if fits else None


def _drawn(args: Args) -> Bounds | None:
    """Return the bounds of ``randint(high, size)`` or ``randint(low, high, size)``."""
    numbers = [value for value in args[:2] if isinstance(value, int)]
    low, high = (0, *numbers)[-2:] if numbers else (0, 0)
    return Bounds(torch.int64, low, high - 1) if high > low else None
