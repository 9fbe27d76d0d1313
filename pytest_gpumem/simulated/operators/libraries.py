"""Fourier transforms, and the note of workspaces that only libraries know.

cuFFT's and cuSOLVER's workspaces are sized by the libraries; they are left out, with a note of the
simulation.

Source: aten/src/ATen/native/cuda/SpectralOps.cpp (_fft_c2r_cufft, _fft_r2c_cufft, _fft_c2c_cufft,
_exec_fft) and CuFFTPlanCache.h (as_cufft_embed), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing

_DIMS_AT_ONCE = 3
"""Dimensions that cuFFT transforms in one call."""


def leave_out(gpu: GPU, operator: str, library: str = "cuSOLVER") -> None:
    """Note that the workspace of ``library`` is in no number."""
    gpu.simulation.note(left_out_note(library, operator))


def left_out_note(library: str, operator: str) -> str:
    """Return a note that the library's workspace is left out."""
    return (
        f"{library}'s workspace for {operator} is not known and left out: "
        f"the peak can be higher on a GPU"
    )


_Layout = tuple[Sequence[int], Sequence[int]]
"""Sizes and strides."""


def _transformed(
    gpu: GPU, given: _Layout, dims: Sequence[int], dtype: torch.dtype, last: int | None = None
) -> _Layout:
    """One call of the library on a tensor of ``dtype``, whose result has ``last`` in its last dim.

    It copies its input where batches are no single dim or where strides cannot be an embedding.
    Returns the layout of the result: batches in the order of the input's strides, then ``dims``.
    """
    sizes, strides = given
    batches = [dim for dim in range(len(sizes)) if dim not in dims]
    batches.sort(key=lambda dim: -strides[dim])
    made = list(sizes)
    if last is not None:
        made[dims[-1]] = last
    batch, step = _collapsed([sizes[dim] for dim in batches], [strides[dim] for dim in batches])
    transformed = [strides[dim] for dim in dims]
    # Of values to fewer values the library counts the longer side.
    counted = [max(sizes[dim], made[dim]) for dim in dims]
    is_half = dtype is torch.float16 and transformed[-1] != 1
    if step is None or is_half or not _is_embedded(batch, step, counted, transformed):
        passing(gpu, torch.Size(sizes).numel() * dtype.itemsize)
    order = [*batches, *dims]
    result = [0] * len(order)
    size = 1
    for dim in reversed(order):
        result[dim] = size
        size *= made[dim]
    return made, result


def _collapsed(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int | None]:
    """Return size and stride of all dims as one, no stride where only a copy has one."""
    batch, step = 1, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if batch > 1 and stride != batch * step:
            return batch, None
        step = stride if batch == 1 else step
        batch *= size
    return batch, step


def _is_embedded(batch: int, step: int, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    if strides[-1] <= 0 or (batch != 1 and step == 0):
        return False
    inner = strides[-1]
    for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if stride <= 0 or stride % inner:
            return False
        inner = stride
    return True


def _by_strides(layout: _Layout, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=lambda dim: -layout[1][dim])


def _in_parts(
    gpu: GPU, layout: _Layout, dims: Sequence[int], dtype: torch.dtype, *, is_given: bool
) -> None:
    """Transform complex values along ``dims``, three at a time, to and fro between two tensors.

    The first is ``is_given`` where it may not be written, so that a second result is taken.
    """
    other = Scratch(gpu)
    rest = list(dims)
    while rest:
        rest = _by_strides(layout, rest)
        layout = _transformed(gpu, layout, rest[-_DIMS_AT_ONCE:], dtype)
        del rest[-_DIMS_AT_ONCE:]
        if rest and is_given:
            other.take(torch.Size(layout[0]).numel() * dtype.itemsize)
            is_given = False
    other.free()


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride()


def _complex(gpu: GPU, self: Tensor, dim: Sequence[int]) -> None:
    leave_out(gpu, "fft", "cuFFT")
    _in_parts(gpu, _layout(self), dim, self.dtype, is_given=True)


def _is_at_once(dim: Sequence[int]) -> bool:
    """use_optimized_cufft_path."""
    return len(dim) <= _DIMS_AT_ONCE and (len(dim) < 2 or tuple(dim[:2]) != (0, 1))


def _to_complex(gpu: GPU, self: Tensor, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "rfft", "cuFFT")
    layout = _layout(self)
    half = self.shape[dim[-1]] // 2 + 1
    # A pair of real values has to be aligned as a complex one.
    aligned = Scratch(gpu, self.nbytes if self.storage_offset() % 2 else 0)
    if _is_at_once(dim):
        _transformed(gpu, layout, [*_by_strides(layout, dim[:-1]), dim[-1]], self.dtype, half)
    else:
        layout = _transformed(gpu, layout, dim[-1:], self.dtype, half)
        other = Scratch(gpu, result.nbytes)
        _in_parts(gpu, layout, dim[:-1], result.dtype, is_given=False)
        other.free()
    aligned.free()


def _to_real(
    gpu: GPU, self: Tensor, dim: Sequence[int], last_dim_size: int, result: Tensor
) -> None:
    # The library overwrites its input.
    leave_out(gpu, "irfft", "cuFFT")
    copy = Scratch(gpu, self.nbytes)
    layout: _Layout = self.shape, torch.empty(self.shape, device="meta").stride()
    if _is_at_once(dim):
        _transformed(gpu, layout, dim, self.dtype, last_dim_size)
    else:
        if len(dim) > 1:
            _in_parts(gpu, _layout(self), dim[:-1], self.dtype, is_given=True)
        _transformed(gpu, layout, dim[-1:], self.dtype, last_dim_size)
    copy.free()


RULES = {
    "_fft_c2c": Rule(after=_complex),
    "_fft_r2c": Rule(after=_to_complex),
    "_fft_c2r": Rule(after=_to_real),
}
