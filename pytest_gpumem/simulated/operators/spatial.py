"""Pooling, resizing and padding: their kernels read contiguous tensors, copied where they are not.

Source: aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu,
AveragePool3d.cu, AdaptiveAveragePooling.cu, AdaptiveMaxPooling2d.cu, UpSampleNearest1d.cu to 3d.cu,
UpSampleLinear1d.cu, UpSampleBilinear2d.cu, UpSampleTrilinear3d.cu and ReflectionPad.cu, of torch
2.6 to 2.15. Outputs come first: the meta kernels give their sizes, types and memory formats as
CUDA's do.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import copied
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, copies_of

_READING = {
    copies_of("self", like="self"): """
        max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d
        upsample_bilinear2d
    """,
    copies_of("grad_output", like="self"): "avg_pool2d_backward _adaptive_avg_pool2d_backward",
    copies_of("grad_output", "self", "indices", like="self"): "max_pool2d_with_indices_backward",
    copies_of("grad_output", like="grad_output"): """
        upsample_nearest2d_backward upsample_bilinear2d_backward _upsample_nearest_exact2d_backward
    """,
    copies_of("self"): """
        reflection_pad1d reflection_pad2d reflection_pad3d upsample_nearest1d upsample_nearest3d
        upsample_linear1d upsample_trilinear3d max_pool3d_with_indices avg_pool3d
        _adaptive_avg_pool3d
    """,
    copies_of("grad_output"): """
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact3d_backward
        _upsample_bilinear2d_aa_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward
    """,
}
"""Operators by the copies that their kernels read."""


def _into_columns(gpu: GPU, self: Tensor, result: Tensor) -> Iterator[Tensor]:
    """im2col_cuda and col2im_cuda: a result as large as the input, which is then resized.

    It moves where it grows, and keeps its memory where it shrinks.
    """
    first = Scratch(gpu, self.nbytes if result.nbytes > self.nbytes else 0)
    if result.nbytes < self.nbytes:
        result.untyped_storage().resize_(self.nbytes)
        yield result
    copies = Scratch(gpu, *copied(self))
    yield result
    first.free()
    copies.free()


RULES = {
    **{names: Rule(after=reading) for reading, names in _READING.items()},
    # max_unpooling2d_forward_out_cuda copies before its result is resized.
    "max_unpool2d max_unpool3d": Rule(before=copies_of("self", "indices")),
    "im2col col2im": Rule(placed=_into_columns),
}
