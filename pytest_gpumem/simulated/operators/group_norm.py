"""Group norm, and the temporaries of its kernels.

Source: aten/src/ATen/native/group_norm.cpp, native/cuda/group_norm_kernel.cu and the formula of
native_group_norm in tools/autograd/derivatives.yaml, torch 2.6 to 2.15. The formula makes the
gradient and the input contiguous, which for meta tensors it does not. Of images whose channels are
last, 2.14 takes a contiguous copy where it normalises them, earlier releases before; 2.15 has
kernels of their own: seen on the dry device, for inputs and gradients of both layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import HALVES, accumulated, copied, suggested_format
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By the input, by its weight and by its bias."""
_FLOAT_STATISTICS = (2, 13)
"""First release that computes statistics of halves in float32 first; 2.11 does not."""
_COPIES_INSIDE = (2, 14)
"""First release that copies inside, and that sums vectors without a sum of each channel."""
_LAYOUTS_SINCE = (2, 15)
"""First release with kernels for channels that are last."""


def _is_kept(gpu: GPU, input: Tensor) -> bool:
    """Return whether kernels read ``input`` with its channels last."""
    layout = suggested_format(input)
    return (
        gpu.version >= _LAYOUTS_SINCE
        and not input.is_contiguous()
        and layout is not torch.contiguous_format
        and input.is_contiguous(memory_format=layout)
    )


def _before(gpu: GPU, input: Tensor) -> Scratch | None:
    return Scratch(gpu, *copied(input)) if gpu.version < _COPIES_INSIDE else None


def _after(
    gpu: GPU,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
) -> None:
    nbytes = accumulated(input.dtype).itemsize
    scratch = Scratch(gpu)
    is_kept = _is_kept(gpu, input)
    if gpu.version >= _COPIES_INSIDE and not is_kept:
        for size in copied(input):
            scratch.take(size)
    if input.dtype in HALVES and gpu.version >= _FLOAT_STATISTICS:
        scratch.take(N * group * nbytes)
        scratch.take(N * group * nbytes)
    if HxW > 1 and (weight is not None or bias is not None or is_kept):
        scratch.take(N * C * nbytes)
        scratch.take(N * C * nbytes)
    scratch.free()


def _backward_given(gpu: GPU, grad_out: Tensor, input: Tensor) -> Scratch:
    if _is_kept(gpu, input):
        return Scratch(gpu, *copied(grad_out, memory_format=suggested_format(input)))
    return Scratch(gpu, *copied(grad_out, input))


def _backward(
    gpu: GPU,
    input: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    result: _Gradients,
) -> None:
    if not N:
        return
    nbytes = accumulated(input.dtype).itemsize
    is_kept = _is_kept(gpu, input)
    scratch = Scratch(gpu)
    if HxW > 1 or gpu.version < _COPIES_INSIDE:
        scratch.take(N * C * nbytes)
        scratch.take(N * C * nbytes)
    if result[0] is not None:
        sums = [scratch.take(N * group * nbytes) for _ in range(2)]
        if HxW > 1 and weight is not None and not is_kept:
            scratch.take(N * C * nbytes)
        # c1 was declared before c2 and c3.
        for address in reversed(sums):
            scratch.drop(address)
    scratch.free()


RULES = {
    "aten::native_group_norm": Rule(before=_before, after=_after),
    "aten::native_group_norm_backward": Rule(before=_backward_given, after=_backward),
}
