"""Pooling, resizing and padding: their kernels read contiguous tensors, copied where they are not.

cuDNN samples grids of coordinates where it can.

Source: aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu,
AveragePool3d.cu, AdaptiveAveragePooling.cu and 3d.cu, AdaptiveMaxPooling2d.cu and 3d.cu,
UpSampleNearest1d.cu to 3d.cu, UpSampleLinear1d.cu, UpSampleBilinear2d.cu, UpSampleTrilinear3d.cu,
ReflectionPad.cu, native/GridSampler.cpp (grid_sampler), GridSamplerUtils.h
(cond_cudnn_grid_sampler) and cudnn/GridSampler.cpp, of torch 2.6 to 2.15. But for the last, outputs
come first: the meta kernels give their sizes, types and memory formats as CUDA's do. Linear,
bicubic and trilinear resizing reads its input by its strides. Each resizing is seen on the dry
device, 2.13 and 2.15, of contiguous, strided and channels-last inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import INDEXABLE, copied, suggested_format
from pytest_gpumem.simulated.operators.rnn import is_acceptable
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, copies_of, is_traced


def _into_columns(gpu: GPU, self: Tensor, result: Tensor) -> Iterator[Tensor]:
    """Yield a result as large as the input, which is then resized (im2col_cuda, col2im_cuda).

    It is reallocated if it grows, and keeps its memory if it shrinks.
    """
    first = Scratch(gpu, self.nbytes if result.nbytes > self.nbytes else 0)
    if result.nbytes < self.nbytes:
        result.untyped_storage().resize_(self.nbytes)
        yield result
    with Scratch(gpu, *copied(self)):
        yield result
        first.free()


_CHANNELS = 4
"""Fewest channels that the kernels for channels last resize at once."""
_CHANNELS_OF_BILINEAR = 16


def _reads_channels_last(read: Tensor, written: Tensor, fewest: int) -> bool:
    layout = suggested_format(read)
    return (
        layout is torch.channels_last
        and read.shape[1] >= fewest
        and written.is_contiguous(memory_format=layout)
    )


def _resized(gpu: GPU, self: Tensor, result: Tensor) -> Scratch:
    """Copy for the kernel of channels last, or else also the result if it is not contiguous."""
    if _reads_channels_last(self, result, _CHANNELS):
        return Scratch(gpu, *copied(self, memory_format=torch.channels_last))
    return Scratch(gpu, *copied(result, self))


def _bilinear(gpu: GPU, self: Tensor, result: Tensor) -> Scratch:
    """Copy no images, unless they have many channels that are last."""
    is_last = _reads_channels_last(self, result, _CHANNELS_OF_BILINEAR)
    return Scratch(gpu, *(copied(self, memory_format=torch.channels_last) if is_last else ()))


def _of_batch(gpu: GPU, self: Tensor, dims: int, *others: Tensor) -> Scratch:
    """Copy a batch that is not contiguous, after ``others``; one sample is read by its strides."""
    return Scratch(gpu, *copied(*others, *((self,) if self.dim() == dims else ())))


def _volumes(gpu: GPU, self: Tensor) -> Scratch:
    """Copy volumes, unless they are channels last, also where there is no batch."""
    layout, batch = suggested_format(self), self
    if self.dim() == 4:
        batch, layout = self.unsqueeze(0), torch.contiguous_format
        if not batch.is_contiguous() and batch.is_contiguous(memory_format=torch.channels_last_3d):
            layout = torch.channels_last_3d
    return Scratch(gpu, *copied(batch, memory_format=layout))


def _averaged(gpu: GPU, self: Tensor) -> Scratch | None:
    """Copy images, unless their channels are last."""
    return _of_batch(gpu, self, 4) if suggested_format(self) is torch.contiguous_format else None


_MOST_CHANNELS = 1024
"""Most channels that cuDNN samples."""


def _grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    by_cudnn = (
        (interpolation_mode, padding_mode, align_corners) == (0, 0, True)
        and input.dim() == 4
        and input.shape[1] <= _MOST_CHANNELS
        and all(is_acceptable(each) and each.numel() < INDEXABLE for each in (input, grid))
        and not is_traced(input)
    )
    if by_cudnn:
        return torch.ops.aten.cudnn_grid_sampler(input, grid)  # type: ignore[no-any-return]  # an operator
    parts = torch.ops.aten.grid_sampler.default.decompose
    return parts(input, grid, interpolation_mode, padding_mode, align_corners)  # type: ignore[no-any-return]  # an operator


ABOVE_AUTOGRAD: dict[str, Composite] = {"aten.grid_sampler.default": _grid_sampler}


def _unless_repeated(*tensors: Tensor) -> list[int]:
    """Return the bytes of copies by contiguousIfZeroInStrides."""
    return copied(*(each for each in tensors if 0 in each.stride()))


RULES = {
    "cudnn_grid_sampler": Rule(
        before=lambda gpu, self, grid: Scratch(gpu, *_unless_repeated(self), *copied(grid))
    ),
    "cudnn_grid_sampler_backward": Rule(
        before=lambda gpu, self, grid, grad_output: Scratch(
            gpu, *_unless_repeated(self), *copied(grid), *_unless_repeated(grad_output)
        )
    ),
    "max_pool2d_with_indices avg_pool2d": Rule(after=copies_of("self", like="self")),
    "max_pool2d_with_indices_backward": Rule(
        after=copies_of("grad_output", "self", "indices", like="self")
    ),
    "avg_pool2d_backward": Rule(after=copies_of("self", "grad_output", like="self")),
    "_adaptive_avg_pool2d_backward": Rule(after=copies_of("grad_output", like="self")),
    """
        reflection_pad1d reflection_pad2d reflection_pad3d upsample_nearest1d
        _upsample_nearest_exact1d avg_pool3d
    """: Rule(after=copies_of("self")),
    """
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward upsample_nearest1d_backward
        _upsample_nearest_exact1d_backward upsample_nearest3d_backward
        _upsample_nearest_exact3d_backward upsample_linear1d_backward
        _upsample_bilinear2d_aa_backward adaptive_max_pool3d_backward
    """: Rule(after=copies_of("grad_output")),
    # A copy comes before the output has its size.
    "_adaptive_avg_pool2d": Rule(before=_averaged),
    "_adaptive_avg_pool3d": Rule(before=lambda gpu, self: _of_batch(gpu, self, 5)),
    # Results that are not contiguous are copied from ones that are.
    "adaptive_max_pool2d": Rule(after=lambda gpu, self, result: _of_batch(gpu, self, 4, *result)),
    "max_pool3d_with_indices": Rule(after=_volumes),
    "adaptive_max_pool3d": Rule(after=lambda gpu, self: _of_batch(gpu, self, 5)),
    "adaptive_max_pool2d_backward": Rule(after=copies_of("grad_output", "indices", "result")),
    "upsample_bilinear2d": Rule(after=_bilinear),
    "upsample_nearest2d _upsample_nearest_exact2d": Rule(after=_resized),
    "upsample_nearest2d_backward upsample_bilinear2d_backward _upsample_nearest_exact2d_backward": (
        Rule(after=lambda gpu, grad_output, result: _resized(gpu, grad_output, result))
    ),
    "upsample_nearest3d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa": (
        Rule(after=copies_of("result", "self"))
    ),
    "upsample_trilinear3d_backward": Rule(after=copies_of("grad_output", "result")),
    # max_unpooling2d_forward_out_cuda copies before its result is resized.
    "max_unpool2d max_unpool3d": Rule(before=copies_of("self", "indices")),
    "im2col col2im": Rule(outputs=_into_columns),
}
