"""Tensors as views of their storages, and tensors on the CPU like them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.machine.real.differentiated import UNREAD

_empty_strided = torch.empty_strided
_as_strided = torch.as_strided


@dataclass(frozen=True)
class Layout:
    """A tensor as a view of its storage, without hold on it: :func:`view_of` takes either."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in elements."""
        return self.strides

    def storage_offset(self) -> int:
        """Return the first element."""
        return self.offset

    def is_conj(self) -> bool:
        """Return whether elements are the conjugates of what the storage has."""
        return self.conjugate

    def is_neg(self) -> bool:
        """Return whether elements are the negatives of what the storage has."""
        return self.negative


def layout_of(
    tensor: torch.Tensor,
) -> tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]:
    """Return the fields of the :class:`Layout` of ``tensor``."""
    return (
        tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def view_of(base: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return the view of ``base``, all elements of a storage, that ``tensor`` is of it."""
    offset = tensor.storage_offset()
    if base.dtype == tensor.dtype:
        # A lazy module's buffer has no shape otherwise.
        shape = tensor.size() if is_lazy(tensor) else tensor.shape
        view = _as_strided(base, shape, tensor.stride(), offset)
    else:
        view = raw.empty(0, dtype=tensor.dtype, device=CPU)
        view.set_(base.untyped_storage(), offset, tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def is_written(memory: torch.Tensor, computed: Any) -> bool:
    """Write a computed result to ``memory``, as far as it is one; return whether it was."""
    if isinstance(computed, torch.Tensor) and computed.numel() == memory.numel():
        memory.copy_(computed.view(memory.shape) if computed.dim() != memory.dim() else computed)
        return True
    if computed is UNREAD or isinstance(computed, int):
        memory.fill_(0 if computed is UNREAD else computed)
        return True
    return False


def covers(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is all of its storage."""
    nbytes: int = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and tensor.numel() == nbytes // tensor.dtype.itemsize


def blank(value: Any) -> Any:
    """Return a CPU tensor of the shape of ``value`` with arbitrary values; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)


def on_device(values: Any) -> list[torch.Tensor]:
    """Return the tensors of a GPU in ``values``."""
    return [tensor for tensor in raw.tensors_in(values) if raw.is_on_device(tensor)]
