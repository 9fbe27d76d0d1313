"""The types that CUDA's kernels are compiled for, and the names they have in torch's error.

``AT_DISPATCH_FLOATING_TYPES_AND2(kHalf, kBFloat16, iter.dtype(), "gelu_cuda", ...)`` raises
``"gelu_cuda" not implemented for 'Long'`` for any other type. Each line below is such a dispatch
in aten/src/ATen/native/cuda of torch 2.6; between 2.6 and 2.13 PyTorch's own record of the types
its operators take on CUDA (torch/testing/_internal/common_methods_invocations.py) changed only
for ``logaddexp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from pytest_gpumem.simulated.machine.checks.given import Check, Given
from pytest_gpumem.simulated.machine.checks.names import scalar_type

_Types = frozenset[torch.dtype]
_DtypeOf = Callable[[Given], torch.dtype]

DOUBLE: _Types = frozenset({torch.float32, torch.float64})
FLOATING: _Types = DOUBLE | {torch.float16, torch.bfloat16}
COMPLEX: _Types = frozenset({torch.complex64, torch.complex128})
HALF_COMPLEX: _Types = COMPLEX | {torch.complex32}
INTEGRAL: _Types = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
BOOL: _Types = frozenset({torch.bool})
REAL: _Types = FLOATING | INTEGRAL


def _dispatches(accepted: _Types, of: _DtypeOf, rows: str) -> Iterator[tuple[str, Check]]:
    """Yield a check by operator for each of ``rows``: operator, kernel (default ``{}_cuda``)."""
    for row in rows.split("\n"):
        name, _, kernel = row.strip().partition(" ")
        if name:
            yield name, _dispatch(kernel.strip() or f"{name}_cuda", accepted, of)


_HALVES_SINCE = (2, 14)
"""First release in which these kernels take 16 bits (tried on 2.13 and 2.15)."""


def _before_halves(checks: Iterable[tuple[str, Check]]) -> dict[str, Check]:
    """``checks``, of releases whose kernels take no halves."""

    def older(check: Check) -> Check:
        return lambda given: None if given.version >= _HALVES_SINCE else check(given)

    return {name: older(check) for name, check in checks}


def _dispatch(kernel: str, accepted: _Types, of: _DtypeOf) -> Check:
    def check(given: Given) -> Exception | None:
        dtype = of(given)
        return None if dtype in accepted else not_implemented(kernel, dtype)

    return check


def not_implemented(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    """Return the error of AT_DISPATCH (ATen/Dispatch.h, AT_DISPATCH_SWITCH)."""
    return NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_type(dtype)}'")


def _of_target(given: Given) -> torch.dtype:
    target: torch.Tensor = given["target"]
    return target.dtype


def _made(given: Given) -> torch.dtype:
    """Return the type of the result of a factory."""
    if given["dtype"] is not None:
        return given["dtype"]  # type: ignore[no-any-return]  # a dtype
    numbers = [given[name] for name in ("start", "end", "step") if given[name] is not None]
    is_whole = all(isinstance(number, int) for number in numbers)
    return torch.int64 if is_whole else torch.get_default_dtype()


DISPATCHES: dict[str, Check] = {
    **dict(
        _dispatches(
            FLOATING,
            Given.dtype,
            """
            elu
            celu elu_cuda
            glu
            gelu GeluCUDAKernelImpl
            gelu_backward GeluBackwardCUDAKernelImpl
            hardshrink
            hardsigmoid
            hardswish
            leaky_relu
            log_sigmoid_forward
            mish
            _prelu_kernel prelu_cuda
            softplus
            softshrink
            rrelu_with_noise rrelu_with_noise_out_cuda
            frac
            lgamma_backward
            _softmax host_softmax
            _log_softmax host_softmax
            _softmax_backward_data host_softmax_backward
            _log_softmax_backward_data host_softmax_backward
            native_layer_norm LayerNormKernelImpl
            native_group_norm GroupNormKernelImpl
            native_batch_norm batch_norm_stats_cuda
            _native_batch_norm_legit batch_norm_stats_cuda
            _batch_norm_with_update batch_norm_stats_cuda
            native_dropout fused_dropout
            native_dropout_backward masked_scale
            _adaptive_avg_pool2d adaptive_avg_pool2d_cuda
            _adaptive_avg_pool3d adaptive_avg_pool3d_cuda
            adaptive_max_pool2d
            adaptive_max_pool3d
            avg_pool2d avg_pool2d_out_cuda_frame
            avg_pool3d avg_pool3d_out_cuda
            max_pool2d_with_indices max_pool2d_with_indices_out_cuda_frame
            max_pool3d_with_indices max_pool3d_with_indices_out_frame
            fractional_max_pool2d fractional_max_pool2d_out_cuda_frame
            fractional_max_pool3d fractional_max_pool3d_out_frame
            grid_sampler_2d
            grid_sampler_3d
            upsample_linear1d upsample_linear1d_out_frame
            upsample_bilinear2d upsample_bilinear2d_out_frame
            upsample_bicubic2d upsample_bicubic2d_out_frame
            upsample_trilinear3d upsample_trilinear3d_out_frame
            _upsample_bilinear2d_aa upsample_bilinear2d_out_frame
            _upsample_bicubic2d_aa upsample_bilinear2d_out_frame
            binary_cross_entropy binary_cross_entropy_out_cuda
            multi_margin_loss multi_margin_loss_cuda
            multilabel_margin_loss_forward multilabel_margin_loss_forward_kernel
            nll_loss2d_forward nll_loss2d_forward_kernel
            _embedding_bag embedding_bag_cuda
            _embedding_bag_forward_only embedding_bag_cuda
            segment_reduce
            """,
        )
    ),
    **dict(
        _dispatches(
            FLOATING,
            Given.common_dtype,
            """
            mse_loss mse_cuda
            smooth_l1_loss smooth_l1_cuda
            huber_loss huber_cuda
            hypot
            nextafter
            """,
        )
    ),
    **dict(
        _dispatches(
            FLOATING,
            Given.floating_dtype,
            """
            atan2
            copysign
            digamma
            erf
            erfc
            erfinv
            i0
            lgamma
            logit
            polygamma
            xlogy
            special_entr entr_cuda
            special_i0e i0e_cuda
            special_i1 i1_cuda
            special_i1e i1e_cuda
            special_xlog1py xlog1py_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            DOUBLE,
            Given.floating_dtype,
            """
            special_airy_ai airy_ai_cuda
            special_bessel_j0 bessel_j0_cuda
            special_bessel_j1 bessel_j1_cuda
            special_bessel_y0 bessel_y0_cuda
            special_bessel_y1 bessel_y1_cuda
            special_chebyshev_polynomial_t chebyshev_polynomial_t_cuda
            special_chebyshev_polynomial_u chebyshev_polynomial_u_cuda
            special_chebyshev_polynomial_v chebyshev_polynomial_v_cuda
            special_chebyshev_polynomial_w chebyshev_polynomial_w_cuda
            special_erfcx erfcx_cuda
            special_hermite_polynomial_h hermite_polynomial_h_cuda
            special_hermite_polynomial_he hermite_polynomial_he_cuda
            special_laguerre_polynomial_l laguerre_polynomial_l_cuda
            special_legendre_polynomial_p legendre_polynomial_p_cuda
            special_log_ndtr log_ndtr_cuda
            special_modified_bessel_i0 modified_bessel_i0_cuda
            special_modified_bessel_i1 modified_bessel_i1_cuda
            special_modified_bessel_k0 modified_bessel_k0_cuda
            special_modified_bessel_k1 modified_bessel_k1_cuda
            special_ndtri ndtri_cuda
            special_scaled_modified_bessel_k0 scaled_modified_bessel_k0_cuda
            special_scaled_modified_bessel_k1 scaled_modified_bessel_k1_cuda
            special_shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_t_cuda
            special_shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_u_cuda
            special_shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_v_cuda
            special_shifted_chebyshev_polynomial_w shifted_chebyshev_polynomial_w_cuda
            special_spherical_bessel_j0 spherical_bessel_j0_cuda
            special_zeta zeta_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            DOUBLE,
            Given.common_dtype,
            """
            igamma
            igammac
            """,
        )
    ),
    **_before_halves(_dispatches(DOUBLE, Given.common_dtype, "polar")),
    **_before_halves(_dispatches(DOUBLE | HALF_COMPLEX, Given.floating_dtype, "angle")),
    **dict(
        _dispatches(
            DOUBLE,
            Given.dtype,
            """
            _cdist_forward cdist_cuda
            _pdist_forward pdist_cuda
            _ctc_loss ctc_loss_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            FLOATING | {torch.uint8},
            Given.dtype,
            """
            upsample_nearest1d upsample_nearest1d_out_frame
            upsample_nearest2d upsample_nearest2d_out_frame
            upsample_nearest3d upsample_nearest3d_out_frame
            _upsample_nearest_exact1d upsample_nearest1d_out_frame
            _upsample_nearest_exact2d upsample_nearest2d_out_frame
            _upsample_nearest_exact3d upsample_nearest3d_out_frame
            """,
        )
    ),
    **dict(
        _dispatches(
            FLOATING | COMPLEX,
            Given.dtype,
            """
            silu
            logcumsumexp
            uniform check_uniform_bounds
            lerp
            """,
        )
    ),
    **dict(
        _dispatches(
            FLOATING | COMPLEX | BOOL,
            Given.dtype,
            """
            im2col im2col_out_cuda
            col2im col2im_out_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            INTEGRAL | BOOL,
            Given.common_dtype,
            """
            bitwise_and
            bitwise_or
            bitwise_xor
            bitwise_not
            """,
        )
    ),
    **dict(
        _dispatches(
            INTEGRAL,
            Given.common_dtype,
            """
            bitwise_left_shift lshift_cuda
            bitwise_right_shift rshift_cuda
            gcd
            lcm
            bincount
            """,
        )
    ),
    **dict(
        _dispatches(
            REAL,
            Given.dtype,
            """
            threshold
            topk topk_out_cuda
            kthvalue
            median median_out_impl
            nanmedian median_out_impl
            max_unpool2d max_unpooling2d_forward_kernel
            max_unpool3d max_unpooling3d_forward_kernel
            index_reduce
            searchsorted searchsorted_out_cuda
            bucketize searchsorted_out_cuda
            argmax
            argmin
            """,
        )
    ),
    **dict(_dispatches(REAL - {torch.float16, torch.bfloat16}, Given.dtype, "histc histc")),
    **dict(
        _dispatches(
            REAL,
            Given.common_dtype,
            """
            fmod
            remainder
            clamp
            """,
        )
    ),
    **dict(
        _dispatches(
            REAL | BOOL,
            Given.dtype,
            """
            cummax
            cummin
            mode cuda_mode
            amax max_values_cuda
            amin min_values_cuda
            aminmax
            """,
        )
    ),
    **dict(
        _dispatches(
            REAL | BOOL,
            Given.common_dtype,
            """
            lt compare_cuda
            le compare_cuda
            gt compare_cuda
            ge compare_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            REAL | COMPLEX,
            Given.common_dtype,
            """
            addcmul
            addcdiv
            cross
            linalg_cross cross_cuda
            """,
        )
    ),
    **dict(
        _dispatches(
            REAL | COMPLEX,
            Given.dtype,
            """
            reflection_pad1d reflection_pad1d_out_template
            reflection_pad2d reflection_pad2d_out_template
            reflection_pad3d reflection_pad3d_out_cuda
            replication_pad1d
            replication_pad2d
            replication_pad3d
            """,
        )
    ),
    **dict(_dispatches(REAL, _made, "arange")),
    **dict(
        _dispatches(
            REAL | COMPLEX,
            _made,
            """
            linspace
            logspace
            """,
        )
    ),
    # cuSOLVER's and cuBLAS's, in native/cuda/linalg.
    **dict(
        _dispatches(
            DOUBLE | COMPLEX,
            Given.dtype,
            """
            cholesky cholesky_cusolver
            linalg_cholesky_ex cholesky_cusolver
            cholesky_inverse cholesky_cuda_potri
            cholesky_solve cholesky_cuda_potrs
            geqrf
            linalg_qr geqrf_cuda
            linalg_eig linalg_eig_out_cuda
            _linalg_eigh linalg_eigh_cuda
            linalg_householder_product orgqr_cuda
            ormqr orgmr_cuda
            linalg_ldl_factor_ex ldl_factor_looped_cusolver
            linalg_ldl_solve ldl_solve_looped_cusolver
            linalg_lu lu_factor_cusolver
            linalg_lu_factor_ex lu_factor_cusolver
            linalg_lu_solve lu_solve_cusolver
            _linalg_det lu_factor_cusolver
            _linalg_slogdet lu_factor_cusolver
            _linalg_solve_ex lu_factor_cusolver
            linalg_solve_triangular triangular_solve_cuda
            triangular_solve
            _linalg_svd svd_cuda_gesvdj
            """,
        )
    ),
}
"""By operator, without overload and without the underscore of one that works in place."""
