"""Fourier transforms, and the note of workspaces that only libraries know.

cuFFT's and cuSOLVER's workspaces are sized by the libraries; where they are unknown they are left
out, with a note of the simulation.

Source: aten/src/ATen/native/cuda/SpectralOps.cpp (_fft_c2r_cufft, _fft_r2c_cufft, _fft_c2c_cufft,
_exec_fft) and CuFFTPlanCache.h (as_cufft_embed), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.cusolver import workspace_bytes
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow

_DIMS_AT_ONCE = 3
"""Dimensions that cuFFT transforms in one call."""


def leave_out(gpu: GPU, operator: str, library: str = "cuSOLVER") -> None:
    """Note that the workspace of ``library`` is not counted."""
    gpu.simulation.note(left_out_note(library, operator))


_CUDA_13 = (2, 11)
"""First release whose wheels have CUDA 13."""


def solve_with(
    gpu: GPU, operator: str, routine: str, rows: int, columns: int, size: int, times: int = 1
) -> None:
    """Take and return the workspace of a routine of cuSOLVER, once for each of ``times`` calls."""
    nbytes = None
    if gpu.version >= _CUDA_13:
        capability = gpu.model.compute_capability
        nbytes = workspace_bytes(routine, capability, rows, columns, size)
    if nbytes is None:
        leave_out(gpu, operator)
        return
    for _ in range(times):
        borrow(gpu, nbytes)


def left_out_note(library: str, operator: str) -> str:
    """Return a note that the library's workspace is left out."""
    return (
        f"{library}'s workspace for {operator} is unknown and not counted, "
        f"so the peak on a GPU can be higher"
    )


_Layout = tuple[Sequence[int], Sequence[int]]
"""Sizes and strides."""


def _transformed(
    gpu: GPU, given: _Layout, dims: Sequence[int], dtype: torch.dtype, last: int | None = None
) -> _Layout:
    """Allocate for one call of the library on a tensor of ``dtype``; return the result's layout.

    It copies its input where batches are no single dim or where strides cannot be an embedding.
    """
    sizes, strides = given
    made = _made(given, dims, last)
    batches = _batches(given, dims)
    batch, step = _collapsed([sizes[dim] for dim in batches], [strides[dim] for dim in batches])
    transformed = [strides[dim] for dim in dims]
    # From more values to fewer, the library counts the longer side.
    counted = [max(sizes[dim], made[0][dim]) for dim in dims]
    is_half = dtype in (torch.float16, torch.complex32, torch.bfloat16)
    if is_half and any(size & (size - 1) for size in counted):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
            f"precision, but got a signal size of{counted}"
        )
    is_read = not is_half or transformed[-1] == 1
    if step is None or not is_read or not _is_embedded(batch, step, counted, transformed):
        borrow(gpu, torch.Size(sizes).numel() * dtype.itemsize)
    return made


def _batches(given: _Layout, dims: Sequence[int]) -> list[int]:
    rest = [dim for dim in range(len(given[0])) if dim not in dims]
    return sorted(rest, key=lambda dim: -given[1][dim])


def _made(given: _Layout, dims: Sequence[int], last: int | None) -> _Layout:
    """Return a result with ``last`` in its last dim: batches as in the input, then ``dims``."""
    sizes = list(given[0])
    if last is not None:
        sizes[dims[-1]] = last
    strides = [0] * len(sizes)
    size = 1
    for dim in reversed([*_batches(given, dims), *dims]):
        strides[dim] = size
        size *= sizes[dim]
    return sizes, strides


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


def _in_parts(layout: _Layout, dims: Sequence[int]) -> Iterator[tuple[_Layout, list[int]]]:
    """Yield what is transformed, three dims at a time, and along which."""
    rest = list(dims)
    while rest:
        rest = _by_strides(layout, rest)
        at_once = rest[-_DIMS_AT_ONCE:]
        yield layout, at_once
        layout = _made(layout, at_once, None)
        del rest[-_DIMS_AT_ONCE:]


def _between(
    gpu: GPU, layout: _Layout, dims: Sequence[int], dtype: torch.dtype, *, is_given: bool
) -> None:
    """Allocate to transform complex values back and forth between two tensors.

    The first is ``is_given`` where it may not be written, so that a second result is taken.
    """
    other = Scratch(gpu)
    for part, at_once in _in_parts(layout, dims):
        _transformed(gpu, part, at_once, dtype)
        if is_given and len(dims) > _DIMS_AT_ONCE:
            other.take(torch.Size(part[0]).numel() * dtype.itemsize)
            is_given = False


def _all_made(layout: _Layout, dims: Sequence[int]) -> _Layout:
    for part, at_once in _in_parts(layout, dims):
        layout = _made(part, at_once, None)
    return layout


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride()


def _empty(layout: _Layout, dtype: torch.dtype) -> Tensor:
    return raw.empty_strided(*layout, dtype=dtype, device=raw.META)


def _is_at_once(dim: Sequence[int]) -> bool:
    """Return use_optimized_cufft_path."""
    return len(dim) <= _DIMS_AT_ONCE and (len(dim) < 2 or tuple(dim[:2]) != (0, 1))


def _complex(gpu: GPU, self: Tensor, dim: Sequence[int]) -> None:
    leave_out(gpu, "fft", "cuFFT")
    _between(gpu, _layout(self), dim, self.dtype, is_given=True)


def _complex_shape(self: Tensor, dim: Sequence[int]) -> Tensor:
    if not dim:
        return raw.empty_like(self, device=raw.META)
    return _empty(_all_made(_layout(self), dim), self.dtype)


def _promoted(self: Tensor) -> torch.dtype:
    """Return promote_type_fft (native/SpectralOps.cpp): since 2.15 bfloat16 runs as float32."""
    return torch.float32 if self.dtype is torch.bfloat16 else self.dtype


def _is_native(gpu: GPU, self: Tensor, dim: Sequence[int]) -> bool:
    """Return whether cuFFT reads bfloat16 itself: at once, and sizes that are powers of two."""
    return (
        self.dtype is torch.bfloat16
        and gpu.model.compute_capability >= (8, 0)
        and _is_at_once(dim)
        and all(self.shape[each].bit_count() == 1 for each in dim)
    )


def _before_complex(gpu: GPU, self: Tensor, dim: Sequence[int], onesided: bool) -> Scratch:
    if not _is_native(gpu, self, dim):
        dtype = _promoted(self)
        return Scratch(gpu, self.numel() * dtype.itemsize if dtype is not self.dtype else 0)
    # cuFFT writes complex values of 16 bits; they are converted to complex64, then mirrored.
    last = self.shape[dim[-1]]
    half = last // 2 + 1
    values = self.numel() // last * half
    scratch = Scratch(gpu, values * torch.complex32.itemsize, _aligned_bytes(self))
    _transformed(gpu, _layout(self), _at_once(self, dim), self.dtype, half)
    scratch.take(0 if onesided or half == last else values * torch.complex64.itemsize)
    return scratch


def _aligned_bytes(self: Tensor) -> int:
    """Return the bytes of a copy: a pair of real values has to be aligned as a complex one."""
    return self.nbytes if self.storage_offset() % 2 else 0


def _at_once(self: Tensor, dim: Sequence[int]) -> list[int]:
    return [*_by_strides(_layout(self), dim[:-1]), dim[-1]]


def _to_complex(gpu: GPU, self: Tensor, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "rfft", "cuFFT")
    if _is_native(gpu, self, dim):
        return
    layout, dtype = _layout(self), _promoted(self)
    half = self.shape[dim[-1]] // 2 + 1
    with Scratch(gpu) as scratch:
        copy = scratch.take(_aligned_bytes(self) if dtype is self.dtype else 0)
        if _is_at_once(dim):
            _transformed(gpu, layout, _at_once(self, dim), dtype, half)
        else:
            layout = _transformed(gpu, layout, dim[-1:], dtype, half)
            scratch.take(result.nbytes)
            scratch.drop(copy)
            _between(gpu, layout, dim[:-1], result.dtype, is_given=False)


def _to_complex_shape(gpu: GPU, self: Tensor, dim: Sequence[int], onesided: bool) -> Tensor:
    layout = _layout(self)
    last = self.shape[dim[-1]]
    if _is_native(gpu, self, dim) and not onesided and last > last // 2 + 1:
        return raw.empty(self.shape, dtype=torch.complex64, device=raw.META)
    last = last // 2 + 1 if onesided else last
    if _is_at_once(dim):
        layout = _made(layout, _at_once(self, dim), last)
    else:
        layout = _all_made(_made(layout, dim[-1:], last), dim[:-1])
    return _empty(layout, _promoted(self).to_complex())


def _before_real(self: Tensor, dim: Sequence[int]) -> _Layout:
    """Return the layout of the copy, which the library overwrites, or of complex values before."""
    if _is_at_once(dim) or len(dim) < 2:
        return _layout(raw.unbacked(self, self.shape))
    return _all_made(_layout(self), dim[:-1])


def _to_real(gpu: GPU, self: Tensor, dim: Sequence[int], last_dim_size: int) -> None:
    leave_out(gpu, "irfft", "cuFFT")
    is_at_once = _is_at_once(dim)
    last = dim if is_at_once else dim[-1:]
    with Scratch(gpu, self.nbytes):
        if not is_at_once:
            _between(gpu, _layout(self), dim[:-1], self.dtype, is_given=True)
        _transformed(gpu, _before_real(self, dim), last, self.dtype, last_dim_size)


def _to_real_shape(self: Tensor, dim: Sequence[int], last_dim_size: int) -> Tensor:
    last = dim if _is_at_once(dim) else dim[-1:]
    return _empty(_made(_before_real(self, dim), last, last_dim_size), self.real.dtype)


RULES = {
    "_fft_c2c": Rule(shapes=_complex_shape, after=_complex),
    "_fft_r2c": Rule(before=_before_complex, shapes=_to_complex_shape, after=_to_complex),
    "_fft_c2r": Rule(shapes=_to_real_shape, after=_to_real),
}
"""Layouts of results are the library's; torch's own kernels for shapes have others in 2.6."""
