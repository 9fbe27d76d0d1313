"""Ranges of random integers: ``(labels != -100).sum()`` is known of labels that were not drawn.

``torch.randint(low, high, ...)`` holds integers from ``low`` to ``high - 1``, and so does a tensor
copied, cut or put together from such tensors; anything written to them ends that.
"""

from __future__ import annotations

import operator as comparing
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import is_on_device, tensors_in
from pytest_gpumem.simulated.machine.storages import storage_key

Range = tuple[int, int]
"""The least and the greatest integer, both included."""

_DRAWN = "aten::randint"
_COPYING = frozenset(
    f"aten::{name}" for name in "clone _to_copy index_select cat stack flip roll repeat".split()
)
"""Operators whose results hold only elements of their first argument."""
_ORDER: dict[str, Callable[[int, Any], bool]] = {
    "aten::lt": comparing.lt,
    "aten::le": comparing.le,
    "aten::gt": comparing.gt,
    "aten::ge": comparing.ge,
}


class Ranges:
    """The ranges of one simulation, by the address of the storage they belong to."""

    def __init__(self) -> None:
        self.by_key: dict[int, tuple[torch.dtype, Range]] = {}

    def made(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember the numbers that the operator ``name`` has drawn, or copied."""
        found = _drawn(args) if name == _DRAWN else self._copied(name, args)
        if found is None or not isinstance(result, torch.Tensor) or not is_on_device(result):
            return
        if _fits(found, result.dtype):
            self.remember(result, found)

    def remember(self, tensor: torch.Tensor, found: Range) -> None:
        """Set the range of ``tensor``."""
        self.by_key[storage_key(tensor)] = tensor.dtype, found

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget the ranges of ``tensors``."""
        for tensor in tensors:
            self.by_key.pop(storage_key(tensor), None)

    def compared(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Return the result of comparison ``name`` for every element; ``None`` if it is unknown."""
        found = self._of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if found is None or len(args) < 2 or not isinstance(args[1], (int, float)):
            return None
        low, high = found
        if name in ("aten::eq", "aten::ne"):
            return name == "aten::ne" if not low <= args[1] <= high else None
        order = _ORDER.get(name)
        if order is None or order(low, args[1]) != order(high, args[1]):
            return None
        return order(low, args[1])

    def _copied(self, name: str, args: tuple[Any, ...]) -> Range | None:
        if name not in _COPYING or not self.by_key or not args:
            return None
        found = [self._of(tensor) for tensor in tensors_in(args[0])]
        known = [each for each in found if each is not None]
        if not known or len(known) < len(found):
            return None
        return min(low for low, _ in known), max(high for _, high in known)

    def _of(self, tensor: torch.Tensor) -> Range | None:
        dtype, found = self.by_key.get(storage_key(tensor), (None, None))
        return found if dtype is tensor.dtype else None


def _fits(found: Range, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    return torch.iinfo(dtype).min <= found[0] and found[1] <= torch.iinfo(dtype).max


def _drawn(args: tuple[Any, ...]) -> Range | None:
    """Return the range of ``randint(high, size)`` or ``randint(low, high, size)``."""
    numbers = [value for value in args[:2] if isinstance(value, int)]
    low, high = (0, *numbers)[-2:] if numbers else (0, 0)
    return (low, high - 1) if high > low else None
