"""Pooling, resizing and padding: their kernels read contiguous tensors, copied where they are not.

Source: aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu,
AveragePool3d.cu, AdaptiveAveragePooling.cu, AdaptiveMaxPooling2d.cu, UpSampleNearest1d.cu to 3d.cu,
UpSampleLinear1d.cu, UpSampleBilinear2d.cu, UpSampleTrilinear3d.cu and ReflectionPad.cu, of torch
2.6 to 2.15. Outputs come first: the meta kernels give their sizes, types and memory formats as
CUDA's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators.layout import suggested_format
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

_IN_ITS_FORMAT = {
    # Operator: the arguments it reads in the memory format of the argument that says the format.
    "max_pool2d_with_indices": ((0,), 0),
    "max_pool2d_with_indices_backward": ((0, 1, 7), 1),
    "avg_pool2d": ((0,), 0),
    "avg_pool2d_backward": ((0,), 1),
    "_adaptive_avg_pool2d": ((0,), 0),
    "_adaptive_avg_pool2d_backward": ((0,), 1),
    "upsample_nearest2d": ((0,), 0),
    "upsample_nearest2d_backward": ((0,), 0),
    "upsample_bilinear2d": ((0,), 0),
    "upsample_bilinear2d_backward": ((0,), 0),
}

_CONTIGUOUS = {
    "reflection_pad1d": (0,),
    "reflection_pad2d": (0,),
    "reflection_pad3d": (0,),
    "reflection_pad1d_backward": (0,),
    "reflection_pad2d_backward": (0,),
    "reflection_pad3d_backward": (0,),
    "upsample_nearest1d": (0,),
    "upsample_nearest3d": (0,),
    "upsample_linear1d": (0,),
    "upsample_trilinear3d": (0,),
    "max_pool3d_with_indices": (0,),
    "avg_pool3d": (0,),
    "_adaptive_avg_pool3d": (0,),
}
"""Operator: the arguments it reads contiguous."""


def _copies(operands: tuple[int, ...], formatted: int | None) -> Rule:
    def after(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        wanted = torch.contiguous_format if formatted is None else suggested_format(args[formatted])
        scratch = None
        for at in operands:
            tensor = args[at] if len(args) > at else None
            if tensor is not None and not tensor.is_contiguous(memory_format=wanted):
                scratch = scratch or Scratch(gpu)
                scratch.take(tensor.nbytes)
        if scratch is not None:
            scratch.free()

    return Rule(after=after)


RULES = {
    **{f"aten::{name}": _copies(*rule) for name, rule in _IN_ITS_FORMAT.items()},
    **{f"aten::{name}": _copies(operands, None) for name, operands in _CONTIGUOUS.items()},
}
