"""Layer norm, root mean square norm and group norm, and the temporaries of their kernels.

Source: aten/src/ATen/native/layer_norm.cpp (rms_norm_symint), cuda/layer_norm_kernel.cu,
group_norm.cpp, cuda/group_norm_kernel.cu and the formula of native_group_norm in
tools/autograd/derivatives.yaml, torch 2.6 to 2.15. On CUDA that formula makes gradient and input
contiguous, for meta tensors it does not. Images whose channels are last are copied by 2.14 inside
the kernel's function and by earlier releases before it; 2.15 has kernels for them: seen on the dry
device, for inputs and gradients of both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import (
    HALF_DTYPES,
    accumulated,
    copied,
    suggested_format,
)
from pytest_gpumem.simulated.operators.rules import (
    Composite,
    Gradients,
    Rule,
    Scratch,
    borrow,
    copies_of,
    decompose,
    first_of,
)

_aten = torch.ops.aten


FUSED_SINCE = (2, 9) if hasattr(_aten, "_fused_rms_norm_backward") else (99,)
"""First release with a kernel for root mean square norm; unknown where this torch has none."""


def rms_norm(
    gpu: GPU,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    """Run ``aten::rms_norm``: one kernel since 2.9, for one type and contiguous layouts."""
    if (
        input.is_cuda
        and gpu.version >= FUSED_SINCE
        and suggested_format(input) is torch.contiguous_format
        and not input.is_complex()
        and (weight is None or weight.dtype == input.dtype)
    ):
        fused = _aten._fused_rms_norm(input, normalized_shape, weight, eps)
        return first_of(fused)  # type: ignore[no-any-return]  # an operator
    return decompose(_aten.rms_norm.default, input, normalized_shape, weight, eps)


# Layer norm and root mean square norm.

_WARP = 32
_MANY_ROWS = 64 * 1024
_LARGEST_GRID = 64 * 1024 // 2


def _sums_by_blocks(gpu: GPU, rows: int, columns: int) -> bool:
    """Return whether many short rows are summed twice (LaunchGammaBetaBackwardCUDAKernel, 2.8)."""
    return (
        gpu.version >= (2, 8) and rows > _MANY_ROWS and columns // _WARP < gpu.model.sm_count // 2
    )


def _layer_norm_gradients(
    gpu: GPU, grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], result: Gradients
) -> Iterator[Tensor]:
    grad_input, *others = result
    given = [tensor for tensor in others if tensor is not None]
    rows, columns = _rows_and_columns(input, normalized_shape)
    if not given or not _sums_by_blocks(gpu, rows, columns):
        yield from (tensor for tensor in result if tensor is not None)
        return
    scratch = Scratch(gpu)
    if grad_input is not None:
        yield grad_input
    first = [scratch.take(tensor.nbytes) for tensor in given]
    if not grad_out.is_contiguous():
        scratch.take(grad_out.nbytes)
    blocks = min(_LARGEST_GRID // -(-columns // _WARP), -(-rows // _WARP))
    for _ in given:
        scratch.take(blocks * columns * input.element_size())
    for tensor, earlier in zip(given, first, strict=True):
        # The sum of the partial results takes the place of the memory allocated for it.
        yield tensor
        shape = blocks, columns
        reductions.reduce(gpu, shape, (columns, 1), input.dtype, 0, reductions.SUMS)
        scratch.drop(earlier)


def _layer_norm_backward(
    gpu: GPU, grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int]
) -> None:
    if not _sums_by_blocks(gpu, *_rows_and_columns(input, normalized_shape)):
        borrow(gpu, *copied(grad_out))


def _rows_and_columns(input: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    columns = math.prod(normalized_shape)
    return input.numel() // max(columns, 1), columns


# Group norm.

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


def _group_norm(
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
    is_kept = _is_kept(gpu, input)
    is_copied = gpu.version >= _COPIES_INSIDE and not is_kept
    scratch = Scratch(gpu, *(copied(input) if is_copied else ()))
    if input.dtype in HALF_DTYPES and gpu.version >= _FLOAT_STATISTICS:
        scratch.take(N * group * nbytes, N * group * nbytes)
    if HxW > 1 and (weight is not None or bias is not None or is_kept):
        scratch.take(N * C * nbytes, N * C * nbytes)


def _group_norm_gradients(gpu: GPU, grad_out: Tensor, input: Tensor) -> Scratch:
    if _is_kept(gpu, input):
        return Scratch(gpu, *copied(grad_out, memory_format=suggested_format(input)))
    return Scratch(gpu, *copied(grad_out, input))


def _group_norm_backward(
    gpu: GPU,
    input: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    result: Gradients,
) -> None:
    if not N:
        return
    nbytes = accumulated(input.dtype).itemsize
    is_kept = _is_kept(gpu, input)
    scratch = Scratch(gpu)
    if HxW > 1 or gpu.version < _COPIES_INSIDE:
        scratch.take(N * C * nbytes, N * C * nbytes)
    if result[0] is not None:
        sums = [scratch.take(N * group * nbytes) for _ in range(2)]
        if HxW > 1 and weight is not None and not is_kept:
            scratch.take(N * C * nbytes)
        scratch.drop(*reversed(sums))  # c1 was declared before c2 and c3


ABOVE_AUTOGRAD: dict[str, Composite] = {"aten.rms_norm.default": rms_norm}

RULES = {
    "native_layer_norm": Rule(before=copies_of("input", "weight", "bias")),
    "native_layer_norm_backward": Rule(
        before=copies_of("input", "weight", "bias"),
        outputs=_layer_norm_gradients,
        after=_layer_norm_backward,
    ),
    "_fused_rms_norm": Rule(before=copies_of("input", "weight")),
    "_fused_rms_norm_backward": Rule(
        before=copies_of("input", "weight"),
        outputs=_layer_norm_gradients,
        after=_layer_norm_backward,
    ),
    "native_group_norm": Rule(
        before=lambda gpu, input: Scratch(
            gpu, *(copied(input) if gpu.version < _COPIES_INSIDE else ())
        ),
        after=_group_norm,
    ),
    "native_group_norm_backward": Rule(before=_group_norm_gradients, after=_group_norm_backward),
}
