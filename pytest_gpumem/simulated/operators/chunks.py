"""Tensors split into pieces, pieces joined, with the kernels' metadata on the device, and rolled.

``fully_shard`` copies by these: gathered tensors by ``split_with_sizes_copy``, tensors to be
reduced by ``_chunk_cat``. A list of blocks, eight bytes for 2 KiB, is made on the host and copied.

Source: aten/src/ATen/native/cuda/TensorShape.cu (``split_with_sizes_copy_out_cuda``,
``get_chunk_cat_metadata``, ``pack_vecs``), torch 2.6 to 2.14; TensorTransformations.cu (roll_cuda)
and native/TensorTransformations.h (roll_common), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod, sqrt

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import is_dense
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, borrow

_aten = torch.ops.aten
_THREADS = 128
"""BLOCK_SIZE."""
_BLOCK = 16 * _THREADS
"""BYTES_PER_BLOCK."""
_NUMBER = 8
"""Bytes of the packed metadata."""


def _split(
    gpu: GPU, self: Tensor, split_sizes: Sequence[int], dim: int, out: Sequence[Tensor] = ()
) -> None:
    tensors = (self, *out)
    if not out or not all(is_dense(one) and one.dtype == self.dtype for one in tensors):
        return
    dim %= self.dim()
    chunks = prod(self.shape[:dim])
    sizes = [size * self.stride(dim) * self.element_size() for size in split_sizes]
    blocks = sum(-(-size // _BLOCK) for size in sizes)
    most = gpu.model.sm_count * gpu.model.max_threads_per_sm // _THREADS * 2
    factor = max(-(-blocks * chunks // most), 1)
    at_once = min(ceil(sqrt(factor)), chunks)
    in_turn = -(-factor // at_once)
    launched = sum(-(-size // (_BLOCK * in_turn)) for size in sizes)
    borrow(gpu, _NUMBER * (4 * len(sizes) + 1 + launched))


def _concatenated(
    gpu: GPU, tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor | None = None
) -> None:
    first = tensors[0]
    dtype = first.dtype if out is None else out.dtype
    is_widened = (first.dtype, dtype) == (torch.bfloat16, torch.float32)
    if all(map(is_dense, tensors)) and (dtype == first.dtype or is_widened):
        borrow(gpu, _NUMBER * (numbers_of(tensors, dim, num_chunks, dtype.itemsize) + 2))
        return
    # Other types are padded, and joined by cat (_pad_chunk of native/TensorShape.cpp).
    scratch, sizes = Scratch(gpu), [max(tensor.size(dim), 1) for tensor in tensors]
    rows = [-(-size // num_chunks) * num_chunks for size in sizes]
    padded = [
        scratch.take(tensor.nbytes // size * row if row > size else 0)
        for tensor, size, row in zip(tensors, sizes, rows, strict=True)
    ]
    scratch.drop(*padded)


def numbers_of(tensors: Sequence[Tensor], dim: int, num_chunks: int, itemsize: int) -> int:
    """Return how many numbers describe the blocks, and the tensors, that are concatenated."""
    blocks = 0
    for tensor in tensors:
        rows = -(-tensor.size(dim) // num_chunks)
        blocks += -(-rows * prod(tensor.shape[dim % tensor.dim() + 1 :]) * itemsize // _BLOCK)
    return 6 * len(tensors) + blocks


def _roll(self: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Tensor:
    if len(dims) != 1:
        return _aten.roll.default._op_dk(torch._C.DispatchKey.CPU, self, shifts, dims)  # type: ignore[no-any-return]  # an operator
    return torch.empty_like(self.contiguous(), memory_format=torch.contiguous_format)


BELOW_AUTOGRAD: dict[str, Composite] = {"aten.roll.default": _roll}
"""Several dims are rolled one after the other, by the same code on every device."""

RULES = {
    "split_with_sizes_copy": Rule(after=_split),
    "_chunk_cat": Rule(after=_concatenated),
}
