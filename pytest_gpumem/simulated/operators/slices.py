"""``x[:, i]`` on releases that still made a view of every ``:``.

Up to 2.8 each ``:`` among several indices became ``aten::slice``, whose backward fills a zeroed
gradient as large as its input; since 2.9 it is skipped. Source: aten/src/ATen/TensorIndexing.h
(applySlice, applySlicing); tried on 2.6, 2.8, 2.9.1, 2.10, 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.gpu.device import parse_version

PASSED_OVER_SINCE = (2, 9)

_FULL = slice(None)
_getitem = torch._C.TensorBase.__getitem__


@contextmanager
def made(version: tuple[int, int]) -> Iterator[None]:
    """Make the views that torch ``version`` makes, where the torch that runs does not."""
    if version >= PASSED_OVER_SINCE or parse_version(None) < PASSED_OVER_SINCE:
        yield
        return
    patches = Patches()
    patches.add(torch.Tensor, "__getitem__", getitem)
    patches.apply()
    try:
        yield
    finally:
        patches.undo()


def getitem(tensor: torch.Tensor, index: Any) -> Any:
    """Return ``tensor[index]``, with a view for every full slice."""
    if (
        index.__class__ is not tuple
        or not raw.is_meta(tensor)
        or not any(item.__class__ is slice and item == _FULL for item in index)
        or not all(map(_is_known, index))
    ):
        return _getitem(tensor, index)
    return _apply(tensor, index)


def _is_known(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.dim() > 0
    if item.__class__ is slice:
        return all(part is None or part.__class__ is int for part in _parts(item))
    return item is None or item is Ellipsis or item.__class__ is int


def _parts(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step


def _apply(tensor: torch.Tensor, index: tuple[Any, ...]) -> Any:
    named = sum(_width(item) for item in index)
    remaining = tensor.dim() - named
    dim = 0
    gathered: list[Any] = []
    for item in index:
        if item.__class__ is int:
            tensor = tensor.select(dim, item)
        elif item is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
        elif item is Ellipsis:
            dim += remaining
        elif item.__class__ is slice:
            tensor = _slice(tensor, dim, item)
            dim += 1
        else:
            gathered += [_FULL] * (dim - len(gathered)) + [item]
            dim += _width(item)
    return _getitem(tensor, tuple(gathered)) if gathered else tensor


def _width(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    masks = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if masks else 1


def _slice(tensor: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    start, stop, step = _parts(item)
    if not start and stop == tensor.shape[dim] and step in (None, 1):
        return tensor
    return torch.ops.aten.slice.Tensor(  # type: ignore[no-any-return]  # an operator
        tensor, dim, start or 0, sys.maxsize if stop is None else stop, step or 1
    )
