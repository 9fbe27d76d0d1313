"""TORCH_CHECKs on the types of arguments that the CUDA side of an operator makes, in its words.

Sources are files of aten/src/ATen/native, torch 2.6 to 2.15 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_gpumem.allocator.settings import Version
from pytest_gpumem.simulated.machine.checks import products
from pytest_gpumem.simulated.machine.checks.given import Check, Given
from pytest_gpumem.simulated.machine.checks.kernels import (
    DOUBLE,
    FLOATING,
    not_implemented,
)
from pytest_gpumem.simulated.machine.checks.names import (
    expected,
    scalar_type,
    tensor_type,
)

_INDICES = frozenset({torch.int64, torch.int32, torch.uint8, torch.bool})

SHORT_INDICES: Version = (2, 8)
"""First release with 32-bit indices in ``gather`` and ``scatter`` (pytorch/pytorch#162711)."""


def _refusing(is_refused: Callable[[torch.dtype], bool], text: str) -> Check:
    def check(given: Given) -> Exception | None:
        refused = next((t.dtype for t in given.tensors() if is_refused(t.dtype)), None)
        return None if refused is None else RuntimeError(text.format(scalar_type(refused)))

    return check


def _is_complex(dtype: torch.dtype) -> bool:
    return dtype.is_complex


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_bool(dtype: torch.dtype) -> bool:
    return dtype is torch.bool


# Layers.


def _same_as_input(given: Given) -> Exception | None:
    """cuda/layer_norm_kernel.cu (LayerNormKernelImplInternal)."""
    for name in ("weight", "bias"):
        parameter = given[name]
        if parameter is not None and parameter.dtype is not given["input"].dtype:
            return expected(given["input"].dtype, parameter.dtype)
    return None


def _group_norm(given: Given) -> Exception | None:
    """group_norm.cpp and cpu/mixed_data_type.h, then cuda/group_norm_kernel.cu."""
    given_type = given["input"].dtype
    parameters = [given[name].dtype for name in ("weight", "bias") if given[name] is not None]
    if all(dtype is given_type for dtype in parameters):
        return None
    if any(dtype is not torch.float32 for dtype in parameters):
        return RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")
    if given_type not in (torch.float16, torch.bfloat16):
        return RuntimeError("mixed dtype (CPU): all inputs must share same datatype.")
    return expected(given_type, torch.float32)


def _convolution(given: Given) -> Exception | None:
    """Refuse integers, as cuDNN takes none and cuda/ConvolutionMM2d.cu and its relatives do."""
    tensor, weight = given["input"], given["weight"]
    if not _is_whole(tensor.dtype) or tensor.dtype is not weight.dtype:
        return None
    return not_implemented(_convolution_kernel(given), tensor.dtype)


def _convolution_kernel(given: Given) -> str:
    dimensions = given["weight"].dim() - 2
    if given["transposed"]:
        return f"slow_conv_transpose{max(dimensions, 2)}d_out_cuda"
    is_depthwise = given["groups"] == given["input"].shape[1] > 1
    if dimensions == 3:
        return "conv_depthwise3d" if is_depthwise else "slow_conv_dilated<>"
    if is_depthwise:
        return "conv_depthwise2d_forward_cuda"
    is_dilated = any(step != 1 for step in given["dilation"])
    return "slow_conv_dilated<>" if is_dilated else "slow_conv2d_cuda"


def _embedding(given: Given) -> Exception | None:
    """Embedding.cpp (embedding_symint) and ATen/TensorUtils.cpp (checkScalarTypes)."""
    dtype = given["indices"].dtype
    if dtype in (torch.int32, torch.int64):
        return None
    return RuntimeError(
        f"Expected tensor for argument #1 'indices' to have one of the following scalar types: "
        f"Long, Int; but got {tensor_type(dtype, on_gpu=True)} instead (while checking arguments "
        f"for embedding)"
    )


def _nll_loss(given: Given) -> Exception | None:
    """cuda/Loss.cu (nll_loss_forward_out_cuda_template)."""
    scores, target = given["self"], given["target"]
    if scores.dim() == 1:
        kernel = "nll_loss_forward_reduce_cuda_kernel_1d"
    elif given["reduction"]:
        kernel = "nll_loss_forward_reduce_cuda_kernel_2d"
    else:
        kernel = "nll_loss_forward_no_reduce_cuda_kernel"
    if not target.numel():
        return None
    if scores.dtype not in FLOATING:
        return not_implemented(kernel, scores.dtype)
    if target.dtype not in (torch.int64, torch.uint8):
        return not_implemented(f"{kernel}_index", target.dtype)
    return None


def _nll_loss2d(given: Given) -> Exception | None:
    """cuda/NLLLoss2d.cu: the target is read as 64-bit integers."""
    target = given["target"]
    return None if target.dtype is torch.int64 else expected(torch.int64, target.dtype)


def _masked_fill(given: Given) -> Exception | None:
    """cuda/IndexKernel.cpp (masked_fill__cuda)."""
    dtype = given["mask"].dtype
    if dtype is torch.bool:
        return None
    return RuntimeError(
        f"masked_fill only supports boolean masks, but got dtype {scalar_type(dtype)}"
    )


def _masked_select(given: Given) -> Exception | None:
    """cuda/IndexKernel.cpp (masked_select_out_cuda_impl)."""
    if given["mask"].dtype is torch.bool:
        return None
    return RuntimeError("masked_select: expected BoolTensor for mask")


def _index(given: Given) -> Exception | None:
    """IndexingUtils.h (checkIndexTensorTypes)."""
    for index in given["indices"]:
        if index is not None and index.dtype not in _INDICES:
            return IndexError("tensors used as indices must be long, int, byte or bool tensors")
    return None


def _index_select(given: Given) -> Exception | None:
    """cuda/Indexing.cu (index_select_out_cuda_impl)."""
    dtype = given["index"].dtype
    is_index = dtype in (torch.int32, torch.int64)
    return None if is_index else not_implemented("index_select_out_cuda_impl", dtype)


def _scattering(name: str) -> Check:
    """ScatterGatherChecks.h and TensorAdvancedIndexing.cpp (gather): 32-bit indices since 2.8."""

    def check(given: Given) -> Exception | None:
        index = given["index"]
        if index.dtype is torch.int64 or not index.numel():
            return None
        if given.version < SHORT_INDICES:
            return RuntimeError(f"{name}(): Expected dtype int64 for index")
        if index.dtype is torch.int32:
            return None
        return RuntimeError(f"{name}(): Expected dtype int32/int64 for index")

    return check


def _where(given: Given) -> Exception | None:
    """TensorCompare.cpp (where_self_out); bytes are deprecated, and taken."""
    dtype = given["condition"].dtype
    if dtype in (torch.bool, torch.uint8):
        return None
    return RuntimeError(
        f"where expected condition to be a boolean tensor, but got a tensor with dtype "
        f"{scalar_type(dtype)}"
    )


# Elements.


def _writing(dtype_of: Callable[[Given], torch.dtype]) -> Check:
    """Require a result that can be cast to its target (ATen/TensorIterator.cpp, compute_types)."""

    def check(given: Given) -> Exception | None:
        target = given.target
        if target is None or given["rounding_mode"] is not None:
            return None
        result = dtype_of(given)
        if torch.can_cast(result, target.dtype):
            return None
        return RuntimeError(
            f"result type {scalar_type(result)} can't be cast to the desired output type "
            f"{scalar_type(target.dtype)}"
        )

    return check


def _two_halves(given: Given) -> Exception | None:
    """TensorFactories.cpp (complex_check_floating)."""
    types = [tensor.dtype for tensor in given.tensors()]
    if all(dtype in DOUBLE or dtype is torch.float16 for dtype in types):
        return None
    return RuntimeError(
        f"Expected both inputs to be Half, Float or Double tensors but got "
        f"{scalar_type(types[0])} and {scalar_type(types[1])}"
    )


def _division(given: Given) -> Exception | None:
    """cuda/BinaryDivTruncKernel.cu and BinaryDivFloorKernel.cu."""
    mode, dtype = given["rounding_mode"], given.common_dtype()
    if mode is None or not (dtype is torch.bool or dtype.is_complex):
        return None
    return not_implemented(f"div_{mode}_cuda", dtype)


def _rounding(name: str) -> Check:
    """cuda/UnaryFractionKernels.cu; integers are copied (UnaryOps.cpp)."""

    def check(given: Given) -> Exception | None:
        dtype = given.dtype()
        if dtype.is_complex and name != "round":
            return RuntimeError(f"{name} is not supported for complex inputs")
        if dtype.is_complex or dtype is torch.bool:
            return not_implemented(f"{name}_cuda", dtype)
        if given["decimals"] is not None and _is_whole(dtype):
            return not_implemented(f"{name}_cuda", dtype)
        return None

    return check


def _extreme(name: str) -> Check:
    """TensorCompare.cpp (check_unsupported_complex); of a whole tensor ReduceAllOps.cpp."""

    def check(given: Given) -> Exception | None:
        dtype = given.dtype()
        if not dtype.is_complex:
            return None
        if given["dim"] is None:
            return not_implemented(f"{name}_all_cuda", dtype)
        return RuntimeError(f"{name}(): does not support complex input")

    return check


def _power(given: Given) -> Exception | None:
    """cuda/PowKernel.cu."""
    dtype = given.common_dtype()
    return not_implemented("pow_cuda", dtype) if dtype is torch.bool else None


def _logarithm(name: str) -> Check:
    """cuda/LogAddExpKernel.cu; complex numbers came after 2.6."""

    def check(given: Given) -> Exception | None:
        dtype = given.common_dtype()
        is_accepted = dtype in FLOATING or (dtype.is_complex and given.version > (2, 6))
        return None if is_accepted else not_implemented(f"{name}_cuda", dtype)

    return check


def _scatter_reduce(given: Given) -> Exception | None:
    """cuda/ScatterGatherKernel.cu: sums of any type, other reductions of numbers that compare."""
    dtype = given.dtype()
    if given["reduce"] == "sum" or not (dtype is torch.bool or dtype.is_complex):
        return None
    return not_implemented("cuda_scatter_gather_base_kernel_func", dtype)


def _fourier(given: Given) -> Exception | None:
    """cuda/CuFFTPlanCache.h (CuFFTConfig): half precision only in powers of two."""
    tensor = given["self"]
    if tensor.dtype is torch.bfloat16:
        if given.version >= (2, 14):  # computed in float32 (tried on 2.13 and 2.15)
            return None
        return RuntimeError("cuFFT doesn't support tensor of type: BFloat16")
    if tensor.dtype not in (torch.float16, torch.complex32):
        return None
    sizes = [given["last_dim_size"] or tensor.shape[dim] for dim in given["dim"]]
    if all(size & (size - 1) == 0 for size in sizes):
        return None
    return RuntimeError(
        f"cuFFT only supports dimensions whose sizes are powers of two when computing in half "
        f"precision, but got a signal size of{sizes}"
    )


def _bernoulli(given: Given) -> Exception | None:
    """cuda/DistributionTemplates.h (bernoulli_kernel): of the tensor of probabilities."""
    probabilities = given["p"]
    if probabilities is None and not given.name.endswith("_"):
        probabilities = given["self"]
    if not isinstance(probabilities, torch.Tensor) or probabilities.dtype.is_floating_point:
        return None
    return RuntimeError(
        f"expected probabilities tensor to have floating type, got "
        f"{scalar_type(probabilities.dtype)}"
    )


def _query(accepted: frozenset[torch.dtype], text: str) -> Check:
    return lambda given: None if given["query"].dtype in accepted else RuntimeError(text)


_HALVES = frozenset({torch.float16, torch.bfloat16})
_NO_FLASH = _query(_HALVES, "FlashAttention only support fp16 and bf16 data type")
_NO_EFFICIENT = _query(_HALVES | {torch.float32}, "Only fp32, half & bf16 supported at the moment")
_NO_COMPLEX_CLAMP = _refusing(_is_complex, "clamp is not supported for complex types")

_PROMOTING = (
    "add sub rsub mul addcmul addcdiv pow remainder fmod maximum minimum clamp lerp".split()
)
_TO_FLOATING = (
    "div true_divide acos acosh asin asinh atan atan2 atanh copysign cos cosh digamma erf erfc "
    "erfinv exp exp2 expm1 i0 lgamma log log10 log1p log2 logit reciprocal rsqrt sigmoid sin sinc "
    "sinh sqrt tan tanh xlogy"
).split()


def _soft_margin_loss(given: Given) -> Exception | None:
    # Loss.cpp (soft_margin_loss_out) computes in place, in a tensor of the input's type.
    dtype = given.dtype()
    if not _is_whole(dtype):
        return None
    wanted = scalar_type(dtype)
    return RuntimeError(f"result type Float can't be cast to the desired output type {wanted}")


_TYPES: dict[str, tuple[Check, ...]] = {
    "mm": (products.mm,),
    "addmm": (products.addmm,),
    "_addmm_activation": (products.addmm,),
    "bmm": (products.bmm,),
    "baddbmm": (products.baddbmm,),
    "addbmm": (lambda given: products.product("addmm_cuda", given),),
    "mv": (products.addmv,),
    "addmv": (products.addmv,),
    "dot": (products.dot,),
    "vdot": (products.dot,),
    "soft_margin_loss": (_soft_margin_loss,),
    # transformers/cuda/flash_attn/flash_api.cpp and mem_eff_attention/gemm_kernel_utils.h.
    "_flash_attention_forward": (_NO_FLASH,),
    "_scaled_dot_product_flash_attention": (_NO_FLASH,),
    "_efficient_attention_forward": (_NO_EFFICIENT,),
    "_scaled_dot_product_efficient_attention": (_NO_EFFICIENT,),
    "native_layer_norm": (_same_as_input,),
    "native_group_norm": (_group_norm,),
    "convolution": (_convolution,),
    "embedding": (_embedding,),
    "nll_loss_forward": (_nll_loss,),
    "nll_loss2d_forward": (_nll_loss2d,),
    "index": (_index,),
    "index_put": (_index,),
    "_index_put_impl": (_index,),
    "index_select": (_index_select,),
    "gather": (_scattering("gather"),),
    "scatter": (_scattering("scatter"),),
    "scatter_add": (_scattering("scatter_add"),),
    "where": (_where,),
    "masked_fill": (_masked_fill,),
    "masked_select": (_masked_select,),
    "complex": (_two_halves,),
    "polar": (_two_halves,),
    "div": (_division,),
    "ceil": (_rounding("ceil"),),
    "floor": (_rounding("floor"),),
    "trunc": (_rounding("trunc"),),
    "round": (_rounding("round"),),
    "pow": (_power,),
    "logaddexp": (_logarithm("logaddexp"),),
    "logaddexp2": (_logarithm("logaddexp2"),),
    "scatter_reduce": (_scattering("scatter_reduce"), _scatter_reduce),
    "_fft_r2c": (_fourier,),
    "_fft_c2c": (_fourier,),
    "_fft_c2r": (_fourier,),
    # Activation.cpp.
    "relu": (_refusing(_is_bool, "Boolean inputs not supported for relu"), _NO_COMPLEX_CLAMP),
    "hardtanh": (_refusing(_is_bool, "Bool inputs not supported for hardtanh"), _NO_COMPLEX_CLAMP),
    # TensorCompare.cpp.
    "clamp": (_NO_COMPLEX_CLAMP,),
    "clamp_min": (_NO_COMPLEX_CLAMP,),
    "clamp_max": (_NO_COMPLEX_CLAMP,),
    "max": (_extreme("max"),),
    "min": (_extreme("min"),),
    # BinaryOps.cpp.
    "maximum": (_refusing(_is_complex, "maximum not implemented for complex tensors."),),
    "minimum": (_refusing(_is_complex, "minimum not implemented for complex tensors."),),
    "fmax": (_refusing(_is_complex, "fmax not implemented for complex tensors."),),
    "fmin": (_refusing(_is_complex, "fmin not implemented for complex tensors."),),
    "heaviside": (_refusing(_is_complex, "heaviside is not yet implemented for complex tensors."),),
    # UnaryOps.cpp.
    "sign": (
        _refusing(
            _is_complex,
            "Unlike NumPy, torch.sign is not intended to support complex numbers. Please use "
            "torch.sgn instead.",
        ),
    ),
    "signbit": (_refusing(_is_complex, "signbit is not implemented for complex tensors."),),
    # cuda/Sort.cpp.
    "sort": (_refusing(_is_complex, "Sort currently does not support complex dtypes on CUDA."),),
    # ReduceOps.cpp.
    "std": (_refusing(_is_whole, "std and var only support floating point and complex dtypes"),),
    "var": (_refusing(_is_whole, "std and var only support floating point and complex dtypes"),),
    # Distributions.cpp.
    "multinomial": (
        _refusing(
            lambda dtype: not dtype.is_floating_point,
            "multinomial only supports floating-point dtypes for input, got: {}",
        ),
    ),
    "bernoulli": (_bernoulli,),
    # cuda/SummaryOps.cu.
    "histc": (_refusing(lambda dtype: dtype is torch.float16, "HalfTensor is not supported"),),
}

REQUIREMENTS: dict[str, tuple[Check, ...]] = dict(_TYPES)
"""By operator, as in ``DISPATCHES``; made before its kernel is chosen."""
for _names, _dtype_of in (
    (_PROMOTING, Given.common_dtype),
    (_TO_FLOATING, Given.floating_dtype),
):
    for _name in _names:
        REQUIREMENTS[_name] = (*REQUIREMENTS.get(_name, ()), _writing(_dtype_of))
