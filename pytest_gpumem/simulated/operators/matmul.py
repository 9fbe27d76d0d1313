"""Matrix products: which library handle they take, hence which workspace.

Source: aten/src/ATen/native/cuda/Blas.cpp (addmm_out_cuda_impl and its gemm_and_bias condition),
CUDABlas.cpp (gemm, bgemm, gemv and dot take getCurrentCUDABlasHandle()).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators.rules import Rule

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

_LT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def _gemm(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if result.numel() and all(t.numel() for t in args if isinstance(t, torch.Tensor)):
        gpu.workspaces.gemm(gpu.stream)


def _addmm(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    bias, mat1, mat2 = args[:3]
    if not result.numel() or not mat1.numel():
        return
    if _bias_in_epilogue(gpu, bias, mat1, mat2, kwargs.get("beta", 1), result):
        gpu.workspaces.gemm_lt(gpu.stream)
    else:
        gpu.workspaces.gemm(gpu.stream)


def _bias_in_epilogue(
    gpu: SimulatedGPU,
    bias: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    beta: Any,
    result: torch.Tensor,
) -> bool:
    one_row_excluded = gpu.version < (2, 12)
    return (
        beta == 1
        and result.dtype in _LT_DTYPES
        and bias.is_contiguous()
        and (bias.dim() == 1 or (gpu.version >= (2, 10) and bias.squeeze().dim() == 1))
        and bias.numel() == mat2.shape[1]
        and mat2.shape[0] > 1
        and mat2.shape[1] > 1
        and (not one_row_excluded or gpu.version < (2, 10) or min(mat1.shape) > 1)
    )


def _dot(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if args[0].numel() > 1:
        gpu.workspaces.gemm(gpu.stream)


RULES = {
    "aten::mm": Rule(after=_gemm),
    "aten::bmm": Rule(after=_gemm),
    "aten::baddbmm": Rule(after=_gemm),
    "aten::mv": Rule(after=_gemm),
    "aten::addmv": Rule(after=_gemm),
    "aten::addmm": Rule(after=_addmm),
    "aten::_addmm_activation": Rule(after=_addmm),
    "aten::dot": Rule(after=_dot),
    "aten::vdot": Rule(after=_dot),
}
