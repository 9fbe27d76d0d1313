"""Types of tensors that an operator has no CUDA kernel for, or that its kernel does not combine.

An error names the operator and the types; CUDA's own text names the kernel in its place. Meta
kernels raise most other errors on types themselves.

Sources: the ``AT_DISPATCH_...`` lines of aten/src/ATen/native/cuda at torch 2.6, which
torch/testing/_internal/common_methods_invocations.py confirms up to 2.13 but for ``logaddexp``;
native/LinearAlgebra.cpp, cuda/Blas.cpp, cuda/layer_norm_kernel.cu, cuda/group_norm_kernel.cu,
cuda/Indexing.cu, ScatterGatherChecks.h, cuda/Loss.cu, cuda/CuFFTPlanCache.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Arguments = Mapping[str, Any]
Check = Callable[[Arguments], "Exception | None"]
"""Returns the error on these arguments, by the names in the operator's schema, or ``None``."""
_Types = frozenset[torch.dtype]

_DOUBLE: _Types = frozenset({torch.float32, torch.float64})
_HALVES: _Types = frozenset({torch.float16, torch.bfloat16})
_FLOATING = _DOUBLE | _HALVES
_COMPLEX: _Types = frozenset({torch.complex64, torch.complex128})
_INTEGRAL: _Types = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL: _Types = frozenset({torch.bool})
_REAL = _FLOATING | _INTEGRAL
_EVERY: _Types = frozenset(each for each in vars(torch).values() if isinstance(each, torch.dtype))
_ORDERED: _Types = frozenset(each for each in _EVERY if not each.is_complex)
_FRACTIONS: _Types = frozenset(each for each in _EVERY if each.is_floating_point or each.is_complex)
_INDEX: _Types = frozenset({torch.int32, torch.int64})

_OPERANDS = frozenset(
    "self input other x n tensor1 tensor2 min max exponent end weight real imag abs angle".split()
)
"""Arguments that take part in the promotion of types."""


def checks_of(func: Any) -> tuple[Check, ...]:
    """Return the checks of the operator ``func`` on the types of its arguments on CUDA."""
    if not func._schema.name.startswith("aten::"):
        return ()
    name = func._schema.name.removeprefix("aten::")
    checks = _CHECKS.get(name.removesuffix("_"), ())
    return (*checks, _writing(name)) if name in _WRITING else checks


def refuse_types(
    checks: tuple[Check, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise an error on arguments of types for which there is no kernel."""
    names = (argument.name for argument in func._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    for tensor in _tensors(given):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return  # Kernels of their own.
        if not tensor.numel():
            return  # CUDA chooses no kernel.
    for check in checks:
        error = check(given)
        if error is not None:
            raise error


def _tensors(given: Arguments) -> list[torch.Tensor]:
    return [v for name, v in given.items() if isinstance(v, torch.Tensor) and name != "out"]


# The type that a kernel is chosen by.


def _first(given: Arguments) -> torch.dtype:
    return _tensors(given)[0].dtype


def _common(given: Arguments) -> torch.dtype:
    """Return the type to which TensorIterator promotes the operands: the first two or three."""
    operands = [
        value
        for name, value in given.items()
        if name in _OPERANDS and isinstance(value, (torch.Tensor, bool, int, float, complex))
    ]
    if len(operands) < 2:
        return _first(given)
    promoted = [torch.result_type(operands[0], other) for other in operands[1:]]
    return promoted[0] if len(promoted) == 1 else torch.promote_types(*promoted)


def _floating(given: Arguments) -> torch.dtype:
    """Return the common type, with integers promoted to the default floating type."""
    dtype = _common(given)
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _made(given: Arguments) -> torch.dtype:
    """Return the type of the result of a factory."""
    if isinstance(given.get("dtype"), torch.dtype):
        return given["dtype"]  # type: ignore[no-any-return]  # a dtype
    numbers = [given[name] for name in ("start", "end", "step") if given.get(name) is not None]
    is_whole = all(isinstance(number, int) for number in numbers)
    return torch.int64 if is_whole else torch.get_default_dtype()


_KERNELS: tuple[tuple[_Types, Callable[[Arguments], torch.dtype], str], ...] = (
    (
        _FLOATING,
        _first,
        "elu celu glu gelu gelu_backward hardshrink hardsigmoid hardswish leaky_relu "
        "log_sigmoid_forward mish _prelu_kernel softplus softshrink rrelu_with_noise frac "
        "lgamma_backward _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_batch_norm_with_update native_dropout native_dropout_backward _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d "
        "max_pool2d_with_indices max_pool3d_with_indices fractional_max_pool2d "
        "fractional_max_pool3d grid_sampler_2d grid_sampler_3d upsample_linear1d "
        "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa binary_cross_entropy multi_margin_loss "
        "multilabel_margin_loss_forward nll_loss_forward nll_loss2d_forward "
        "_embedding_bag _embedding_bag_forward_only segment_reduce",
    ),
    (_FLOATING, _common, "mse_loss smooth_l1_loss huber_loss hypot nextafter"),
    (
        _FLOATING,
        _floating,
        "atan2 copysign digamma erf erfc erfinv i0 lgamma logit polygamma xlogy special_entr "
        "special_i0e special_i1 special_i1e special_xlog1py",
    ),
    (
        _DOUBLE,
        _floating,
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u "
        "special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx "
        "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l "
        "special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
        "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w "
        "special_spherical_bessel_j0 special_zeta",
    ),
    (_DOUBLE, _common, "igamma igammac"),
    (_DOUBLE, _first, "_cdist_forward _pdist_forward _ctc_loss"),
    (_DOUBLE | {torch.float16}, _first, "complex"),
    (
        _FLOATING | {torch.uint8},
        _first,
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d",
    ),
    (
        _FLOATING | _COMPLEX,
        _first,
        "silu logcumsumexp uniform lerp mm addmm _addmm_activation bmm baddbmm addbmm mv "
        "addmv dot vdot",
    ),
    (_FLOATING | _COMPLEX, _common, "logaddexp logaddexp2"),
    (_FLOATING | _COMPLEX | _BOOL, _first, "im2col col2im"),
    (_INTEGRAL | _BOOL, _common, "bitwise_and bitwise_or bitwise_xor bitwise_not"),
    (_INTEGRAL, _common, "bitwise_left_shift bitwise_right_shift gcd lcm bincount"),
    (
        _REAL,
        _first,
        "threshold topk kthvalue median nanmedian max_unpool2d max_unpool3d index_reduce "
        "searchsorted bucketize argmax argmin",
    ),
    (_INTEGRAL | _DOUBLE, _first, "histc"),
    (_REAL, _common, "fmod remainder clamp"),
    (
        _REAL | _BOOL,
        _first,
        "cummax cummin mode amax amin aminmax",
    ),
    (_REAL | _BOOL, _common, "lt le gt ge"),
    (_REAL | _COMPLEX, _common, "addcmul addcdiv cross linalg_cross"),
    (
        _REAL | _COMPLEX,
        _first,
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    (_FRACTIONS, _first, "std var convolution soft_margin_loss"),
    (_FRACTIONS & _ORDERED, _first, "multinomial"),
    (_ORDERED, _first, "max min sign signbit sort"),
    (_ORDERED - _BOOL, _first, "relu hardtanh ceil floor trunc round"),
    (_ORDERED, _common, "clamp_min clamp_max maximum minimum fmax fmin heaviside"),
    (_EVERY - _BOOL, _common, "pow"),
    (_REAL, _made, "arange"),
    (_REAL | _COMPLEX, _made, "linspace logspace"),
    (  # cuSOLVER's and cuBLAS's, in native/cuda/linalg.
        _DOUBLE | _COMPLEX,
        _first,
        "cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve geqrf linalg_qr linalg_eig "
        "_linalg_eigh linalg_householder_product ormqr linalg_ldl_factor_ex linalg_ldl_solve "
        "linalg_lu linalg_lu_factor_ex linalg_lu_solve _linalg_det _linalg_slogdet "
        "_linalg_solve_ex linalg_solve_triangular triangular_solve _linalg_svd",
    ),
    # transformers/cuda/flash_attn/flash_api.cpp and mem_eff_attention/gemm_kernel_utils.h.
    (_HALVES, _first, "_flash_attention_forward _scaled_dot_product_flash_attention"),
    (
        _HALVES | {torch.float32},
        _first,
        "_efficient_attention_forward _scaled_dot_product_efficient_attention",
    ),
)
"""The types that CUDA's kernels are compiled for, the type they are chosen by, and operators."""

_SAME = {
    "mm": "self mat2",
    "addmm": "self mat1 mat2",
    "_addmm_activation": "self mat1 mat2",
    "addmv": "self mat vec",
    "mv": "self vec",
    "dot": "self tensor",
    "vdot": "self other",
    "native_layer_norm": "input weight bias",
    "native_group_norm": "input weight bias",
    "complex": "real imag",
    "polar": "abs angle",
}
"""By operator: arguments that are of one type, unless ``out_dtype`` says which types there are."""

_OF_INDICES: dict[str, tuple[str, _Types]] = {
    "index_select": ("index", _INDEX),
    "gather": ("index", _INDEX),
    "scatter": ("index", _INDEX),
    "scatter_add": ("index", _INDEX),
    "scatter_reduce": ("index", _INDEX),
    "nll_loss_forward": ("target", frozenset({torch.int64, torch.uint8})),
    "nll_loss2d_forward": ("target", frozenset({torch.int64})),
    "masked_select": ("mask", _BOOL),
}

_WRITING = frozenset(
    f"{name}_"
    for name in "add sub mul addcmul addcdiv pow remainder fmod clamp lerp div true_divide".split()
)
"""Operators in place, whose result is cast to the type of the tensor they write to."""


def _not_implemented(name: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f'"{name}" not implemented on CUDA for {dtype}')


def _dispatch(name: str, accepted: _Types, dtype_of: Callable[[Arguments], torch.dtype]) -> Check:
    def check(given: Arguments) -> Exception | None:
        dtype = dtype_of(given)
        return None if dtype in accepted else _not_implemented(name, dtype)

    return check


def _same(name: str, arguments: str) -> Check:
    def check(given: Arguments) -> Exception | None:
        types = {
            each: given[each].dtype for each in arguments.split() if given.get(each) is not None
        }
        if len(set(types.values())) == 1 or given.get("out_dtype") is not None:
            return None
        listed = ", ".join(f"{each} {dtype}" for each, dtype in types.items())
        return RuntimeError(f"{name} expects tensors of the same dtype, but got {listed}")

    return check


def _indices(name: str, argument: str, accepted: _Types) -> Check:
    def check(given: Arguments) -> Exception | None:
        dtype = given[argument].dtype
        return None if dtype in accepted else _not_implemented(f"{name} ({argument})", dtype)

    return check


def _writing(name: str) -> Check:
    """Require a result that can be cast to its target (ATen/TensorIterator.cpp, compute_types)."""

    def check(given: Arguments) -> Exception | None:
        result = (_floating if "div" in name else _common)(given)
        target = given["self"].dtype
        if given.get("rounding_mode") is not None or torch.can_cast(result, target):
            return None
        return RuntimeError(
            f"{name}: result type {result} can't be cast to the desired output type {target}"
        )

    return check


def _fourier(given: Arguments) -> Exception | None:
    """Refuse half precision in other sizes than powers of two (CuFFTConfig)."""
    if given["self"].dtype not in (torch.float16, torch.complex32):
        return None
    sizes = [given.get("last_dim_size") or given["self"].shape[dim] for dim in given["dim"]]
    if all(size & (size - 1) == 0 for size in sizes):
        return None
    return RuntimeError(f"cuFFT takes only powers of two in half precision, but got {sizes}")


def _decimals(given: Arguments) -> Exception | None:
    """Refuse integers that are rounded to decimals (cuda/UnaryFractionKernels.cu)."""
    dtype = given["self"].dtype
    if given.get("decimals") is None or dtype in _FRACTIONS:
        return None
    return _not_implemented("round (decimals)", dtype)


def _all_checks() -> dict[str, tuple[Check, ...]]:
    rows = [(name, _same(name, arguments)) for name, arguments in _SAME.items()]
    rows += [(name, _indices(name, *row)) for name, row in _OF_INDICES.items()]
    rows.append(("round", _decimals))
    rows += [(name, _fourier) for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r")]
    for accepted, dtype_of, names in _KERNELS:
        rows += [(name, _dispatch(name, accepted, dtype_of)) for name in names.split()]
    return {name: tuple(check for each, check in rows if each == name) for name, _ in rows}


_CHECKS = _all_checks()
"""By operator, without overload and without the underscore of one that works in place."""
