"""Memory formats, derived from sizes and strides as in C++; copies into them, and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch._ops import OpOverload

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
INDEX_BYTES = 8
"""Bytes of the indices and counts that torch keeps: 64 bits."""
INDEXABLE = 2**31 - 1
"""Most elements, or bytes, that kernels index with 32 bits."""

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_ORDERS = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""Dims of channels-last tensors, fastest first."""


def round_up(value: int, multiple: int) -> int:
    """Return the multiple of ``multiple`` that is ``value`` or next."""
    return -(-value // multiple) * multiple


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return ``TensorImpl::suggest_memory_format`` (c10/core/MemoryFormat.h), for any version."""
    if tensor.dim() in _LAST and is_channels_last(tensor.shape, tensor.stride()):
        return _LAST[tensor.dim()]
    return torch.contiguous_format


@lru_cache(maxsize=4096)
def is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether strides of an image or a volume are those of channels last."""
    if not strides[1]:
        return False
    least = 0
    for dim in _ORDERS[len(shape)]:
        if not shape[dim] or strides[dim] < least:
            return False
        # Ambiguous strides are those of a contiguous tensor.
        if not dim and least == strides[1]:
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def copied(
    *tensors: torch.Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> list[int]:
    """Return the bytes of each copy that ``contiguous(memory_format=...)`` makes, in order."""
    return [
        tensor.nbytes
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    ]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, each place once, in any order.

    Source: c10/core/TensorImpl.h, ``is_non_overlapping_and_dense``; in Python releases have it
    under different names.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size < 2:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which CUDA's kernels sum values of ``dtype`` (``toAccumulateType``)."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def elementwise_strides(
    shape: tuple[int, ...], operands: Sequence[torch.Tensor], *, beside_number: bool = False
) -> tuple[int, ...]:
    """Return the strides of a new result of ``shape`` of TensorIterator.

    A number among the operands counts as a tensor without dimensions (``beside_number``).

    Source: aten/src/ATen/TensorIterator.cpp (compute_fast_setup_type, compute_strides,
    reorder_dimensions, compatible_stride). Python's kernels for ``meta`` differ from it beside
    operands that are broadcast, and in a dimension of one element, whose stride may be any number.
    """
    if not beside_number and all(one.shape == shape for one in operands):
        if all(one.is_contiguous() for one in operands):
            return _packed(shape, range(len(shape) - 1, -1, -1))
        if len(shape) == 4 and all(
            one.is_contiguous(memory_format=torch.channels_last) for one in operands
        ):
            return _packed(shape, _ORDERS[4])
        first = operands[0]
        if is_dense(first) and all(one.stride() == first.stride() for one in operands):
            return first.stride()
    return _packed(shape, _order(shape, operands))


def _packed(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps; ``order`` has the fastest dimension first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _order(shape: Sequence[int], operands: Sequence[torch.Tensor]) -> list[int]:
    """Return the dimensions by the strides of the ``operands``, the fastest one first."""
    given = []
    for one in operands:
        missing = len(shape) - one.dim()
        pairs = zip(one.shape, one.stride(), shape[missing:], strict=True)
        own = [0 if size == 1 and whole != 1 else stride for size, stride, whole in pairs]
        given.append([0] * missing + own)

    def comes_after(dim: int, other: int) -> bool | None:
        for strides in given:
            if not strides[dim] or not strides[other]:
                continue
            if strides[dim] != strides[other]:
                return strides[dim] > strides[other]
            if shape[dim] > shape[other]:
                return True
        return None

    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        place = start
        for before in reversed(range(start)):
            answer = comes_after(order[before], order[place])
            if answer:
                order[before], order[place] = order[place], order[before]
                place = before
            elif answer is False:
                break
    return order


_BESIDE_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod"),
        *("eq", "ne", "lt", "le", "gt", "ge", "copysign", "xlogy", "special_xlog1py", "where"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__", "atan2"),
        *("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "maximum"),
        *("minimum", "logical_and", "logical_or", "logical_xor", "fmax", "fmin"),
    )
)
"""Operators whose numbers are operands of TensorIterator, tensors without a dimension."""
_ALIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "flip", "native_dropout", "sort", "hardswish_backward", "elu_backward"),
        "binary_cross_entropy_backward",
    )
)
"""Operators whose (first) results have the strides of their first operand, where that is dense."""

_PACKED = frozenset(
    f"aten::{name}"
    for name in (
        *("masked_fill", "tril", "triu", "native_layer_norm", "native_layer_norm_backward"),
        *("glu_backward", "_log_softmax_backward_data"),
    )
)
"""Operators whose (first) results are contiguous."""
_FORMATTED = {
    "aten::native_batch_norm_backward": 1,
    "aten::batch_norm_backward": 1,
    "aten::cudnn_batch_norm_backward": 0,
}
"""Operators whose first results have the format of this operand, and without training none."""
_OTHERS = frozenset({"aten.angle.default", "aten.clone.default", "aten.pow.Scalar"})
"""Pointwise operators whose results TensorIterator does not make, or not always."""
_UNTAGGED = frozenset({"aten::hardsigmoid_backward", "aten::softplus_backward"})
"""Operators whose results it makes, too, though torch does not tag them as pointwise."""
_SECOND_FIRST = frozenset({"aten::threshold_backward", "aten::binary_cross_entropy_backward"})
"""Operators whose first operand in C++ is their second argument (Activation.cpp, Loss.cu)."""


@cache
def _is_pointwise(func: OpOverload) -> bool:
    """Return whether TensorIterator makes the result of ``func``."""
    if func._schema.name in _UNTAGGED:
        return True
    return torch.Tag.pointwise in func.tags and str(func) not in _OTHERS


def strides_in_cpp(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
) -> tuple[int, ...] | None:
    """Return the strides of ``result`` in C++; ``None`` where Python's kernel gives the same.

    Gradients by Python's formulas have the layout of what they are multiplied by; CUDA's kernels
    allocate the result before. Source of those: layer_norm_kernel.cu, Normalization.cu and .cuh,
    Activation.cpp of native/cuda; native/cudnn/BatchNorm.cpp, native/SoftMax.cpp, Activation.cpp.
    """
    if not isinstance(result, torch.Tensor) or result.dim() < 2:
        return None
    shape, name = tuple(result.shape), func._schema.name
    operands = [one for one in args if isinstance(one, torch.Tensor)]
    if 0 in shape or not operands:
        return None
    if name in _SECOND_FIRST:
        operands[:2] = operands[1::-1]
    if name in _ALIKE and kwargs.get("memory_format") in (None, torch.preserve_format):
        own = operands[0].stride() if is_dense(operands[0]) else result.stride()
    elif name in _PACKED:
        own = _packed(shape, range(len(shape) - 1, -1, -1))
    elif name in _FORMATTED:
        format = suggested_format(operands[_FORMATTED[name]])
        is_last = format is not torch.contiguous_format and args[7] is not False
        own = _packed(shape, _ORDERS[len(shape)] if is_last else range(len(shape) - 1, -1, -1))
    elif name in _BESIDE_NUMBERS or _is_pointwise(func):
        beside_number = name in _BESIDE_NUMBERS and len(operands) < len(args)
        own = elementwise_strides(shape, operands, beside_number=beside_number)
    else:
        return None
    return None if own == result.stride() else own
