"""Copies between host and GPU: staged unless both sides are one stretch of memory.

The host waits for those that block.

Source: aten/src/ATen/native/cuda/Copy.cu (copy_requires_temporaries, copy_kernel_cuda) and
native/TensorConversions.cpp (_to_copy), of torch 2.6 to 2.15. Copies between GPUs that reach each
other's memory, and copies on one GPU, take nothing. Of sparse tensors the parts
are copied, which are contiguous.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import is_dense
from pytest_gpumem.simulated.operators.rules import Scratch, borrow


def stage_upload(gpu: GPU, target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Allocate the temporary of ``target.copy_(source)`` from the host.

    The host converts its data first, unless the copy does not block.
    """
    if target.layout is not torch.strided or not target.numel():
        return
    converts = target.dtype != source.dtype
    is_direct = not converts and _are_one_stretch(target, source)
    if not is_direct and (not target.is_contiguous() or (converts and non_blocking)):
        sent = source if non_blocking else target
        borrow(gpu, target.numel() * sent.element_size())
    gpu.copies(source, target, non_blocking=non_blocking)


def stage_download(gpu: GPU, target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Allocate the temporaries of ``target.copy_(source)`` to the host."""
    if source.layout is not torch.strided:
        return
    is_one_stretch = _are_one_stretch(target, source)
    _download(gpu, source, target.dtype, target.shape, is_one_stretch, non_blocking)
    if target.numel():
        gpu.copies(target, source, non_blocking=non_blocking)


def stage_move(gpu: GPU, source: Tensor, options: dict[str, Any]) -> None:
    """Allocate the temporaries of ``source.to("cpu", **options)``; a copy keeps a dense layout."""
    wanted = options.get("memory_format") or torch.preserve_format
    if wanted is torch.preserve_format:
        kept = is_dense(source)
    else:
        kept = source.is_contiguous(memory_format=wanted)
    dtype, non_blocking = options.get("dtype") or source.dtype, bool(options.get("non_blocking"))
    _download(gpu, source, dtype, source.shape, kept, non_blocking)
    if not non_blocking:
        gpu.copies()


def _download(
    gpu: GPU,
    source: Tensor,
    dtype: torch.dtype,
    shape: torch.Size,
    one_stretch: bool,
    non_blocking: bool,
) -> None:
    converts = dtype != source.dtype
    if one_stretch and not converts:
        return
    if not (converts and non_blocking):
        if not source.is_contiguous() or source.shape != shape:
            borrow(gpu, shape.numel() * source.element_size())
        return
    scratch = Scratch(gpu)
    converted = scratch.take(source.numel() * dtype.itemsize)
    # A dense copy is contiguous (infer_dense_strides).
    dims = zip(source.shape, source.stride(), strict=True)
    is_in_order = all(one >= other for one, other in pairwise(step for n, step in dims if n > 1))
    if not is_in_order or source.shape != shape:
        scratch.take(shape.numel() * dtype.itemsize)
        scratch.drop(converted)


def _are_one_stretch(target: Tensor, source: Tensor) -> bool:
    """Return TensorIteratorBase::is_contiguous of the pair: the same dense layout."""
    if target.numel() == 1:
        return True
    if target.shape != source.shape:
        return False
    layouts = zip(target.shape, target.stride(), source.stride(), strict=True)
    return all(size < 2 or one == other for size, one, other in layouts) and is_dense(target)
