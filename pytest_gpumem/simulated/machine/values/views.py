"""Tensors as views of their storages, and tensors on the CPU like them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import UNREAD


class Layout(NamedTuple):
    """A tensor as a view of its storage, without a reference to either."""

    shape: torch.Size
    stride: tuple[int, ...]
    """In elements, as the offset."""
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @property
    def end(self) -> int:
        """The byte after the last element, from the beginning of the storage."""
        pairs = zip(self.shape, self.stride, strict=True)
        reach = sum(max(size - 1, 0) * step for size, step in pairs)
        return (self.offset + reach + 1) * self.dtype.itemsize


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of ``tensor``."""
    size, step = tensor.size(), tensor.stride()  # a lazy module's parameter has no ``shape``
    offset = int(tensor.storage_offset())
    return Layout(size, step, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def view_of(base: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the view of ``base``, all elements of a storage, that has ``layout``."""
    shape, stride, offset, dtype, is_conj, is_neg = layout
    if base.dtype == dtype:
        view = raw.as_strided(base, shape, stride, offset)
    else:
        view = raw.empty(0, dtype=dtype, device=raw.CPU)
        view.set_(base.untyped_storage(), offset, shape, stride)
    view = view.conj() if is_conj else view
    return torch._neg_view(view) if is_neg else view


def write_result(memory: torch.Tensor, computed: Any) -> bool:
    """Write ``computed`` to ``memory`` if it is a tensor or an integer; return whether it is."""
    if isinstance(computed, torch.Tensor) and computed.numel() == memory.numel():
        memory.copy_(computed.view(memory.shape) if computed.dim() != memory.dim() else computed)
        return True
    if computed is UNREAD or isinstance(computed, int):
        memory.fill_(0 if computed is UNREAD else computed)
        return True
    return False


def covers(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, whose elements do not overlap, fills its storage."""
    nbytes: int = tensor.untyped_storage().nbytes()
    return is_dense(tensor) and tensor.numel() == nbytes // tensor.dtype.itemsize


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` begins its storage and leaves no gap between its elements."""
    return layout_of(tensor).end == max(tensor.numel(), 1) * tensor.dtype.itemsize


def arbitrary(value: Any) -> Any:
    """Return a CPU tensor of the shape of ``value`` with arbitrary values; no tensor, as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return raw.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=raw.CPU)


def on_device(values: Any) -> list[torch.Tensor]:
    """Return the tensors of a GPU in ``values``."""
    return [tensor for tensor in raw.tensors_in(values) if raw.is_on_device(tensor)]
