"""Operators that autograd records as one, and that one native function builds from others.

They have no kernel of CUDA's own: CompositeExplicitAutograd in native_functions.yaml, or one of
CPU and CUDA, where ``meta`` has a kernel only for the shape of the result. Source:
aten/src/ATen/native/Distance.cpp (_euclidean_dist, which cdist_impl takes for more than 25 rows),
AffineGridGenerator.cpp, Loss.cpp (binary_cross_entropy_with_logits, soft_margin_loss_backward),
ReduceOps.cpp (dist, logsumexp), BinaryOps.cpp (ldexp), UnaryOps.cpp (mvlgamma), PackedSequence.cpp,
TensorAdvancedIndexing.cpp (_unsafe_masked_index, masked_scatter_backward), TensorCompare.cpp
(isinf), Linear.cpp (_trilinear), LinearAlgebra.cpp (addbmm, _linalg_det_out, _linalg_slogdet_out,
linalg_polar, linalg_matrix_sqrth: new in 2.15), transformers/attention.cpp (_safe_softmax) and
transformer.cpp (transformer_encoder_layer_forward), torch 2.6 to 2.15. ``_functional`` overloads
are generated (torchgen/gen_functionalization_type.py, gen_composite_functional_kernel): what the
operator itself writes to is copied before.

Kernels of other libraries are built from torch's operators, too: torchvision's (``vision``) and
bitsandbytes', which packs weights to 4 and 8 bits and multiplies by them. Results of a user's C++
kernel for one element, which torch compiles for a GPU, have unknown values.

Source: bitsandbytes/backends/cuda/ops.py (quantize_blockwise, quantize_4bit, gemm_4bit,
_dequant_linear_fallback, _gemm_4bit_kernel_impl, int8_vectorwise_quant, int8_mm_dequant) and
default/ops.py (int8_scaled_mm) of bitsandbytes 0.50; torch/cuda/jiterator.py and
aten/src/ATen/native/cuda/jit_utils.cpp, cuda/jiterator.cu (CompileAndLaunchKernel: outputs of a
TensorIterator whose type all inputs are promoted to), torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch.nn import functional

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.signatures import overload_of
from pytest_gpumem.simulated.operators import vision
from pytest_gpumem.simulated.operators.rules import Composite, passed

_BUILT = """
    _batch_norm_with_update_functional.default _convolution.default _euclidean_dist.default
    _linalg_det.default _linalg_det.result _linalg_slogdet.default _linalg_slogdet.sign
    _native_batch_norm_legit_functional.default _pack_padded_sequence.default _safe_softmax.default
    _transformer_encoder_layer_fwd.default _trilinear.default _unsafe_masked_index.default
    _unsafe_masked_index_put_accumulate.default addbmm.default addbmm.out addbmm_.default
    affine_grid_generator.default binary_cross_entropy_with_logits.default
    convolution_backward.default dist.default isinf.default ldexp.Tensor ldexp_.default
    linalg_matrix_sqrth.default linalg_pinv.atol_rtol_tensor linalg_polar.default linalg_polar.out
    logsumexp.default logsumexp.out masked_scatter_backward.default mvlgamma.default
    mvlgamma_.default rrelu_with_noise_functional.default soft_margin_loss_backward.default
    soft_margin_loss_backward.grad_input
""".split()

_KEYS = (
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch._C.DispatchKey.CPU,
)
"""Dispatch keys of kernels that do the same on every device; an operator runs its first one."""


def _built() -> dict[str, Composite]:
    """Return the functions of :data:`_BUILT` that this torch has, each with its shared kernel.

    Where torch takes one apart above autograd, as 2.6 does ``ldexp``, it comes as its parts.
    """
    found = {name: operator for name in _BUILT if (operator := overload_of(name))}
    return {
        f"aten.{name}": partial(_run, operator, key)
        for name, operator in found.items()
        if (key := next(filter(operator.has_kernel_for_dispatch_key, _KEYS), None))
    }


def _run(operator: Any, key: torch._C.DispatchKey, *args: Any) -> Any:
    given, named = passed(operator, args)
    return operator._op_dk(key, *given, **named)


def _copied(name: str, *args: Any) -> Tensor:
    """Call the overload ``name``, and copy its result to the last of ``args``, as CUDA does.

    Source: mvlgamma_out of aten/src/ATen/native/UnaryOps.cpp; cuda/SummaryOps.cu
    (_histc_out_cuda), cuda/SpectralOps.cpp (_fft_c2c_cufft_out, _fft_c2r_cufft_out),
    torch 2.6 to 2.15.
    """
    operator: Any = overload_of(name)
    *args_without, out = args
    given, named = passed(operator, args_without)
    result = operator(*given, **named)
    return torch.mul(result, 1, out=out)


ABOVE_AUTOGRAD: dict[str, Composite] = {
    f"aten.linalg_matrix_rank.{out}": partial(_copied, f"linalg_matrix_rank.{overload}")
    for out, overload in (
        ("out", "default"),
        ("out_tol_tensor", "tol_tensor"),
        ("atol_rtol_tensor_out", "atol_rtol_tensor"),
        ("atol_rtol_float_out", "atol_rtol_float"),
    )
}
"""Replacements by overload. Under a dispatch mode torch's own function returns a new tensor and
does not write to ``out`` (matrix_rank_impl of aten/src/ATen/native/LinearAlgebra.cpp, 2.6 to
2.15)."""


def _fft_r2c_out(
    self: Tensor, dim: Sequence[int], normalization: int, onesided: bool, out: Tensor
) -> Tensor:
    """Copy one half, and mirror it in place for the other (_fft_r2c_cufft_out)."""
    half = torch.ops.aten._fft_r2c(self, dim, normalization, True)
    shape = half.shape if onesided else self.shape
    if out.shape != shape:
        out.resize_(shape)
    torch.mul(half, 1, out=out.narrow(dim[-1], 0, half.shape[dim[-1]]))
    return out


BELOW_AUTOGRAD: dict[str, Composite] = {
    **{
        f"aten.{name}.out": partial(_copied, name)
        for name in ("mvlgamma", "histc", "_fft_c2c", "_fft_c2r")
    },
    "aten._fft_r2c.out": _fft_r2c_out,
    **_built(),
}


_KERNELS = "bitsandbytes.backends.cuda.ops"
"""The module that registers the operator for GPUs."""


def _gemm_4bit(
    gpu: GPU,
    A: Tensor,  # noqa: N803 - the schema's names
    shapeB: Sequence[int],  # noqa: N803
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    if _has_kernel_for(A, shapeB, blocksize):
        rows = A.contiguous()
        offset = None if absmax_offset is None else absmax_offset.to(torch.float32)
        result = A.new_empty((*A.shape[:-1], shapeB[0]))
        del rows, offset
        return result
    scales = shifted = None
    if absmax_8bit is not None and absmax_offset is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        shifted = scales + absmax_offset
    result = functional.linear(A, A.new_empty(tuple(shapeB)), bias)
    del scales, shifted
    return result


def _has_kernel_for(rows: Tensor, shape: Sequence[int], blocksize: int) -> bool:
    """Return whether bitsandbytes multiplies by its own kernel, as its own code decides."""
    kernels: Any = sys.modules[_KERNELS]
    count = rows.numel() // rows.shape[-1]
    if count > kernels._gemm_4bit_custom_max_m or rows.shape[-1] % blocksize:
        return False
    for cached in (kernels._gpu_dispatch_props, kernels._gemm_4bit_use_custom_fn):
        cached.cache_clear()  # it may have seen another GPU
    chosen = kernels._gemm_4bit_use_custom_fn(rows.device.index, rows.dtype, count, *shape)
    return bool(chosen)


def _quantize_4bit(
    gpu: GPU,
    A: Tensor,  # noqa: N803
    blocksize: int,
    quant_storage: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows, count = A.contiguous(), A.numel()
    scales = _scales(rows, blocksize)
    packed = (count + 1) // (quant_storage.itemsize * 2)
    return rows.new_empty((packed, 1), dtype=quant_storage), scales


def _quantize_blockwise(gpu: GPU, A: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:  # noqa: N803
    rows = A.contiguous()
    scales = _scales(rows, blocksize)
    return torch.empty_like(rows, dtype=torch.uint8), scales


def _scales(rows: Tensor, blocksize: int) -> Tensor:
    return rows.new_empty((-(rows.numel() // -blocksize),), dtype=torch.float32)


def _quantize_rows(
    gpu: GPU,
    A: Tensor,  # noqa: N803
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    scales = A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)
    packed = A.new_empty(A.shape, dtype=torch.int8)
    columns = None
    if threshold:
        outliers = A.abs() >= threshold
        found = bool(outliers.any())
        columns = torch.argwhere(outliers.any(dim=0)).view(-1) if found else A.new_empty(0).long()
    return packed, scales, columns


def _int8_scaled_mm(
    gpu: GPU,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    product = A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32)
    return _int8_mm_dequant(gpu, product, dtype, bias)


def _int8_mm_dequant(
    gpu: GPU,
    A: Tensor,  # noqa: N803
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    result = torch.empty_like(A, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        result.add_(bias)
    return result.to(dtype or torch.float16)


PARTS: dict[str, Composite] = {
    **vision.PARTS,
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.int8_mm_dequant.default": _int8_mm_dequant,
    "bitsandbytes.int8_scaled_mm.default": _int8_scaled_mm,
    "bitsandbytes.int8_vectorwise_quant.default": _quantize_rows,
    "bitsandbytes.quantize_4bit.default": _quantize_4bit,
    "bitsandbytes.quantize_blockwise.default": _quantize_blockwise,
}


def jiterated(function: Any, *tensors: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """Return the outputs of a compiled kernel, of the shape that its inputs broadcast to.

    Raises ``KeyError`` in torch's words for an argument that the kernel does not have.
    """
    for name in kwargs:
        if name not in function.kwargs_dict:
            raise KeyError(f"{name} is not declared in function definition")
    spread = torch.broadcast_tensors(*tensors)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    strides = compute_elementwise_output_strides(*spread)
    made = tuple(
        torch.empty_strided(spread[0].shape, strides, dtype=dtype, device=tensors[0].device)
        for _ in range(function.num_outputs)
    )
    return made if len(made) > 1 else made[0]
