"""Kernels for ``meta``: those that torch does not have, and those with other shapes than CUDA's.

Source: the allocations of each operator's CUDA function (aten/src/ATen/native/cuda/
MultiMarginLoss.cu, MultiLabelMarginCriterion.cu, Distributions.cpp, native/cudnn/GridSampler.cpp,
native/BatchLinearAlgebra.cpp (geqrf), native/Activation.cpp (glu_jvp, glu_backward_jvp),
native/quantized/cuda and native/quantized/FakeQuantPerTensorAffine.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.machine.signatures import overload_of
from pytest_gpumem.simulated.operators.layout import accumulated
from pytest_gpumem.simulated.operators.rules import is_traced

_aten = torch.ops.aten


def _compressed(matrix: Tensor) -> Tensor:
    """Return half of the values with their places (cuSPARSELtOps.cpp: compression_factor)."""
    rows, columns = matrix.shape
    return matrix.new_empty((rows, columns * (10 if matrix.itemsize == 1 else 9) // 16))


def fused_rms_norm(input: Tensor, normalized_shape: list[int], *args: Any) -> Any:
    """Return a contiguous result and a number of each row, for which autograd has a formula."""
    inner = len(normalized_shape)
    rstd = input.new_empty(
        (*input.shape[: input.dim() - inner], *[1] * inner), dtype=accumulated(input.dtype)
    )
    return torch.empty_like(input, memory_format=torch.contiguous_format), rstd


def _contiguous(gradient: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _loss(input: Tensor, target: Tensor, reduction: int = 1, *args: Any) -> Tensor:
    """Return a loss of the input's type, whatever the target's is; by default it is reduced."""
    return input.new_empty(()) if reduction else torch.empty_like(input)


def _unshuffled(image: Tensor, factor: int) -> Tensor:
    height, width = (image.unflatten(at, (-1, factor)).shape[at - 1] for at in (-2, -1))
    return image.new_empty((*image.shape[:-3], image.shape[-3] * factor**2, height, width))


def _angle(tensor: Tensor) -> Tensor:
    """Return angles, of complex numbers contiguous: an empty result is resized (UnaryOps.cpp)."""
    if tensor.is_complex():
        return tensor.new_empty(tensor.shape, dtype=tensor.dtype.to_real())
    _, dtype = elementwise_dtypes(tensor, type_promotion_kind=KIND.INT_TO_FLOAT)
    return torch.empty_like(tensor, dtype=dtype)


def _of_loss(gradient: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a contiguous gradient; a compiler that traces sees the layout of torch's formula."""
    if is_traced(input):
        return torch.mul(input, gradient).to(input.dtype)
    return _contiguous(gradient, input)


def _batched(first: Tensor, second: Tensor, **out: Any) -> Any:
    """Multiply; where there is nothing to multiply the types may differ, and the last one counts.

    Source: LinearAlgebra.cpp (common_checks_baddbmm_bmm), cuda/Blas.cpp (bmm_out_cuda_impl).
    """
    if first.dtype is not second.dtype and not first.numel() * second.numel():
        first = first.to(second.dtype)
    return _meta_registrations.meta_bmm(first, second, **out)


def _written(name: str) -> Callable[..., Any]:
    """Return a kernel that gives results the shapes of those that the overload ``name`` makes."""
    overload: Any = overload_of(name)

    def write(*args: Any, **results: Tensor) -> tuple[Tensor, ...]:
        made = overload(*args)
        for given, one in zip(results.values(), made, strict=False):
            if given.shape != one.shape:
                given.resize_(one.shape).as_strided_(one.shape, one.stride())
        return tuple(results.values())

    return write


WRONG: dict[str, Callable[..., Any]] = {
    "bmm": _batched,
    "bmm.out": _batched,
    "baddbmm.dtype": lambda added, a, b, out_dtype, **factors: a.new_empty(
        (*a.shape[:-1], b.shape[-1]), dtype=out_dtype
    ),
    "_weight_int4pack_mm": lambda a, packed, *_: a.new_empty((a.shape[0], packed.shape[0] * 8)),
    "angle": _angle,
    "binary_cross_entropy": lambda x, y, weight=None, reduction=1: _loss(x, y, reduction),
    "copysign.Tensor": torch.true_divide,
    "hardtanh_backward": lambda gradient, x, *_: torch.add(gradient, x),
    "huber_loss": _loss,
    **dict.fromkeys(
        "huber_loss_backward mse_loss_backward smooth_l1_loss_backward".split(), _of_loss
    ),
    "lerp_.Tensor": lambda x, end, weight: x.copy_(_aten.lerp.Tensor(x, end, weight)),
    "log_sigmoid_forward.output": lambda x, output, buffer: (output.resize_(x.shape), buffer),
    "normal.Tensor_Tensor": lambda mean, std, **_: mean.new_empty(
        torch.broadcast_shapes(mean.shape, std.shape)
    ),
    "pixel_unshuffle": _unshuffled,
    "pow.Scalar": lambda base, exponents: exponents.new_empty(
        exponents.shape, dtype=torch.result_type(base, exponents)
    ),
    "rrelu_with_noise": lambda x, *_, **__: _contiguous(x, x),
    "soft_margin_loss": _loss,
    "view_copy": lambda x, size: x.new_empty(x.new_empty(x.shape).view(size).shape),
}
"""By overload: replacements of kernels of torch's that take the result's type for a factor, that
read the device that a tensor on ``meta`` is a fake of, that compare types of matrices without
elements, that print a tensor with a tangent (``lerp_`` to choose an overload, which then fails), or
whose layout is another than CUDA's.

Source: torch/_decomp/decompositions.py (baddbmm, registered for all overloads) of 2.8 to 2.15,
torch/_meta_registrations.py (meta__weight_int4pack_mm) of 2.13; native/cuda/int4mm.cu,
native/UnaryOps.cpp (angle), BinaryOps.cpp (copysign), Pow.cpp (pow of a number, contiguous),
PixelShuffle.cpp, DistributionTemplates.h (normal_impl), Loss.cpp (huber_loss, soft_margin_loss),
Activation.cpp (hardtanh_backward), TensorShape.cpp (view_copy_symint), cuda/Loss.cu
(binary_cross_entropy_cuda) and cuda/RreluWithNoise.cu.
"""

SHAPES: dict[str, Callable[..., Any]] = {
    "_compute_linear_combination": lambda tensors, coefficients: tensors.new_empty(
        (len(coefficients), *tensors.shape[1:])
    ),
    "cudnn_grid_sampler": lambda image, grid: image.new_empty((*image.shape[:2], *grid.shape[1:3])),
    "cudnn_grid_sampler_backward": lambda *read: tuple(
        each.new_empty(each.shape) for each in read[:2]
    ),
    **dict.fromkeys(
        "_standard_gamma _standard_gamma_grad _sample_dirichlet _dirichlet_grad binomial glu_jvp "
        "glu_backward_jvp".split(),
        lambda tensor, *args, **kwargs: torch.empty_like(tensor),
    ),
    **dict.fromkeys(
        "multi_margin_loss_backward multilabel_margin_loss_backward "
        "fractional_max_pool3d_backward".split(),
        _contiguous,
    ),
    "geqrf": lambda matrix: (
        matrix.new_empty(matrix.mT.shape).mT,
        matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:]))),
    ),
    "geqrf.a": _written("geqrf.default"),
    "mode.values": _written("mode.default"),
    "_native_batch_norm_legit.out": _written("_native_batch_norm_legit.default"),
    "_native_batch_norm_legit.no_stats_out": _written("_native_batch_norm_legit.no_stats"),
    "_cslt_compress": _compressed,
    "_padded_dense_to_jagged_forward": lambda dense, offsets, *rows: dense.new_empty(
        (rows[0] if rows else offsets[0][-1].item(), dense.shape[-1])
    ),
    **dict.fromkeys(("_scaled_mm.out", "_scaled_mm_v2.out"), lambda *_, out, **__: out),
    "_logcumsumexp.out": lambda read, dim, *, out: out.resize_(read.shape),
    **dict.fromkeys(
        (
            "fake_quantize_per_tensor_affine_cachemask",
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            "fake_quantize_per_channel_affine_cachemask",
        ),
        lambda tensor, *_: (torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)),
    ),
    # These only write to their arguments.
    **dict.fromkeys(
        "_fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_ _fused_adagrad_.tensor_lr "
        "_fused_adam_.tensor_lr _fused_adamw_.tensor_lr".split(),
        lambda *args, **kwargs: None,
    ),
}
"""By operator name, and what compiled code calls with a buffer of its own for the result."""


def _is_zero(one: Any) -> bool:
    return isinstance(one, Tensor) and one._is_zerotensor()


def _asked(self: Any, other: Any, kind: Any = KIND.DEFAULT) -> tuple[torch.Size, dict[str, Any]]:
    """Return shape and options of a result, after the zeros were made to ask ``meta`` for them."""
    for each in filter(_is_zero, (other, self)):
        _aten.zeros((), dtype=each.dtype, device=META)
    shapes = [each.shape for each in (self, other) if isinstance(each, Tensor)]
    _, dtype = elementwise_dtypes(self, other, type_promotion_kind=kind)
    return torch.broadcast_shapes(*shapes), {"dtype": dtype, "device": META}


def _product(self: Any, other: Any) -> Tensor:
    shape, options = _asked(self, other)
    return _aten._efficientzerotensor(shape, **options)  # type: ignore[no-any-return]


def _quotient(self: Any, other: Any) -> Tensor:
    shape, options = _asked(self, other, KIND.INT_TO_FLOAT)
    if _is_zero(other):
        number = torch.nan if _is_zero(self) else torch.inf
        return _aten.full(shape, number, **options)  # type: ignore[no-any-return]
    return _aten._efficientzerotensor(shape, **options)  # type: ignore[no-any-return]


def _sum(self: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    given = other if _is_zero(self) else self
    if _is_zero(given):
        return _product(self, other)
    shape, options = _asked(self, other)
    if isinstance(given, Tensor):
        copied = _aten._to_copy(given.expand(shape), dtype=options["dtype"])
    else:
        copied = _aten.full(shape, given, **options)
    result: Tensor = copied.mul(alpha) if given is other and alpha != 1 else copied
    return result


def _dot(self: Tensor, other: Tensor) -> Tensor:
    return _aten._efficientzerotensor((), dtype=self.dtype, device=META)  # type: ignore[no-any-return]


ZEROS: dict[str, Callable[..., Tensor]] = {
    "add.Tensor": _sum,
    "sub.Tensor": lambda self, other, *, alpha=1: _sum(self, other, alpha=-alpha),
    "mul.Tensor": _product,
    "div.Tensor": _quotient,
    "dot": _dot,
    "vdot": _dot,
}
"""By overload, for torch's dispatch key ``ZeroTensor``: zeros without memory, which forward-mode
derivatives add up (``torch._efficientzerotensor``).

Sums and products of them have kernels of their own, which find type and shape of a result on
``meta``: zeros go there as one number that is expanded, in memory for so long. Source:
aten/src/ATen/native/BinaryOps.cpp (maybe_add_maybe_sub, mul_zerotensor, div_zerotensor),
native/cuda/Blas.cpp (dot_cuda), ATen/ZeroTensorFallback.cpp; seen with torch 2.11 and 2.15.
"""
