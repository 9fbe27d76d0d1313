"""Memory formats, derived from sizes and strides as in C++; copies into them, and types."""

from __future__ import annotations

from functools import lru_cache

import torch

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
INDEX_BYTES = 8
"""Bytes of the indices and counts that torch keeps: 64 bits."""
INDEXABLE = 2**31 - 1
"""Most elements, or bytes, that kernels index with 32 bits."""

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_ORDERS = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""Dims of channels-last tensors, fastest first."""


def round_up(value: int, multiple: int) -> int:
    """Return the multiple of ``multiple`` that is ``value`` or next."""
    return -(-value // multiple) * multiple


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return ``TensorImpl::suggest_memory_format`` (c10/core/MemoryFormat.h), for any version."""
    if tensor.dim() in _LAST and is_channels_last(tensor.shape, tensor.stride()):
        return _LAST[tensor.dim()]
    return torch.contiguous_format


@lru_cache(maxsize=4096)
def is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether strides of an image or a volume are those of channels last."""
    if not strides[1]:
        return False
    least = 0
    for dim in _ORDERS[len(shape)]:
        if not shape[dim] or strides[dim] < least:
            return False
        # Ambiguous strides are those of a contiguous tensor.
        if not dim and least == strides[1]:
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def copied(
    *tensors: torch.Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> list[int]:
    """Return the bytes of each copy that ``contiguous(memory_format=...)`` makes, in order."""
    return [
        tensor.nbytes
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    ]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, each place once, in any order.

    Source: c10/core/TensorImpl.h, ``is_non_overlapping_and_dense``; in Python releases have it
    under different names.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size < 2:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which CUDA's kernels sum values of ``dtype`` (``toAccumulateType``)."""
    return torch.float32 if dtype in HALF_DTYPES else dtype
