"""What is known of tensors beside values: that all elements are equal, or that some are infinite.

A mask of any size is known where every element of it is the same. Nothing is computed for each
element, nor kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated import finite
from pytest_gpumem.simulated.nesting import tensors_in
from pytest_gpumem.simulated.storages import storage_key

if TYPE_CHECKING:
    from pytest_gpumem.simulated.values import Operator, Values

META = torch.device("meta")

_ELEMENTWISE = frozenset(
    "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or "
    "bitwise_xor mul eq ne lt le gt ge".split()
)
_SAME = frozenset(
    "clone _to_copy any all amax amin max min mean index_select cat stack flip roll".split()
)
"""Operators whose results hold what each element of their first argument holds."""
_COUNTING = frozenset({"sum", "count_nonzero"})
_SOURCES = {"aten::_to_copy": 0, "aten::copy_": 1}
"""Which argument is copied."""


@dataclass(frozen=True)
class Fact:
    """What is known of a storage."""

    value: torch.Tensor | None = None
    """What every element holds, as a tensor of no dimensions on the CPU."""
    assumed: bool = False
    """Whether that, or the values that are kept of it, go back to an assumption."""
    infinite: bool = False
    """Whether the program has put infinities or NaN in it."""


class Facts:
    """The facts of one simulation, by the address of the storage they belong to."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.by_key: dict[int, Fact] = {}

    def of(self, tensor: torch.Tensor) -> Fact | None:
        """What is known of the storage of ``tensor``."""
        return self.by_key.get(storage_key(tensor)) if self.by_key else None

    def uniform(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What every element of ``tensor`` holds, if it is the same and known."""
        fact = self.of(tensor)
        if fact is None or fact.value is None or fact.value.dtype != tensor.dtype:
            return None
        return fact.value

    def is_infinite(self, tensor: torch.Tensor) -> bool:
        """Whether the program has put infinities or NaN in it."""
        fact = self.of(tensor)
        return fact is not None and fact.infinite

    def is_assumed(self, values: Iterable[Any]) -> bool:
        """Whether what is known of a tensor among ``values`` goes back to an assumption."""
        found = (self.of(tensor) for tensor in tensors_in(values))
        return any(fact is not None and fact.assumed for fact in found)

    def of_results(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Fact | None:
        """What the facts of its arguments say of the results of ``operator``."""
        given = [*args, *kwargs.values()]
        infinite = self._is_filled(operator, args, kwargs)
        if not self.by_key:
            return Fact(infinite=True) if infinite else None
        if not infinite and finite.stays_infinite(operator.name):
            read = given[1:] if operator.overwrites else given
            infinite = any(map(self.is_infinite, tensors_in(read)))
        value = None if infinite else self._computed(operator, args, kwargs)
        assumed = self.is_assumed(given)
        return Fact(value, assumed, infinite) if assumed or infinite or value is not None else None

    def _is_filled(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an infinity or NaN comes in by a number, or with few numbers from the host."""
        if operator.fills and finite.brings_infinity(self._values, args, kwargs):
            return True
        at = _SOURCES.get(operator.name)
        if at is None or self._values.is_unknown_on_host(args[at]):
            return False
        return finite.holds_infinity(args[at])

    def counted(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``nonzero`` of a mask yields whose elements are all equal: without its values.

        Where none is set there are none.
        """
        value = self.uniform(tensor)
        if value is None:
            return None
        count = tensor.numel() if value else 0
        device = META if count else torch.device("cpu")
        return torch.empty((count, tensor.dim()), dtype=torch.int64, device=device)

    def _computed(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        name = operator.name.removeprefix("aten::").removesuffix("_")
        if name in _ELEMENTWISE:
            return self._elementwise(operator, args)
        if name in _SAME or name in _COUNTING:
            return self._of_equal(args[0])
        return None

    def _of_equal(self, given: Any) -> torch.Tensor | None:
        """The one value of a tensor, or of all tensors of a list."""
        tensors = [given] if isinstance(given, torch.Tensor) else given
        found = [self.uniform(tensor) for tensor in tensors if tensor.numel()]
        first = found[0] if found else None
        if first is None or any(other is None or first != other for other in found):
            return None
        return first

    def _elementwise(self, operator: Operator, args: tuple[Any, ...]) -> torch.Tensor | None:
        choices = [self._choices(value) for value in args]
        results = [
            # Where it writes, to a copy.
            operator.func(*(v.clone() if isinstance(v, torch.Tensor) else v for v in chosen))
            for chosen in product(*choices)
        ]
        if not results or any(bool(results[0] != other) for other in results):
            return None
        first: torch.Tensor = results[0]
        return first

    def _choices(self, value: Any) -> list[Any]:
        """What an element can hold: a condition that is not known either of two things."""
        if not isinstance(value, torch.Tensor):
            return [value]
        uniform = self.uniform(value)
        if uniform is not None:
            return [uniform]
        if (single := self._values.single(value)) is not None:
            return [torch.tensor(single, dtype=value.dtype, device="cpu")]
        if value.dtype is torch.bool:
            return [torch.tensor(choice, device="cpu") for choice in (False, True)]
        return []


def of_result(operator: Operator, fact: Fact, source: Any, result: torch.Tensor) -> Fact:
    """``fact``, of the results of ``operator``, for ``result`` and its type."""
    value = fact.value
    if value is None:
        return fact
    name = operator.name.removeprefix("aten::")
    if name in _COUNTING and isinstance(source, torch.Tensor) and result.numel():
        each = value.ne(0) if name == "count_nonzero" else value
        value = each * (source.numel() // result.numel())
    return Fact(value.to(result.dtype), fact.assumed, fact.infinite)
