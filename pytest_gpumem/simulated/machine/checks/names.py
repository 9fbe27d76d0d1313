"""Names of types in torch's errors.

Source: c10/core/ScalarType.h (toString), c10/util/typeid.h (the names of C++ types), torch 2.6 to
2.15; torch/csrc/Exceptions.cpp (processErrorMsg), which turns ``CUDAFloatType`` into
``torch.cuda.FloatTensor`` and has no such name for bfloat16, bool or complex numbers.
"""

from __future__ import annotations

import torch

_NAMES = {
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
    torch.float16: ("Half", "c10::Half"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.int64: ("Long", "long"),
    torch.int32: ("Int", "int"),
    torch.int16: ("Short", "short"),
    torch.int8: ("Char", "signed char"),
    torch.uint8: ("Byte", "unsigned char"),
    torch.bool: ("Bool", "bool"),
    torch.complex32: ("ComplexHalf", "c10::complex<c10::Half>"),
    torch.complex64: ("ComplexFloat", "c10::complex<float>"),
    torch.complex128: ("ComplexDouble", "c10::complex<double>"),
    torch.uint16: ("UInt16", "unsigned short"),
    torch.uint32: ("UInt32", "unsigned int"),
    torch.uint64: ("UInt64", "unsigned long"),
    torch.float8_e4m3fn: ("Float8_e4m3fn", "c10::Float8_e4m3fn"),
    torch.float8_e5m2: ("Float8_e5m2", "c10::Float8_e5m2"),
    torch.float8_e4m3fnuz: ("Float8_e4m3fnuz", "c10::Float8_e4m3fnuz"),
    torch.float8_e5m2fnuz: ("Float8_e5m2fnuz", "c10::Float8_e5m2fnuz"),
}
_LEGACY = frozenset({"Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half"})


def scalar_type(dtype: torch.dtype) -> str:
    """``Half``: the name of a ``ScalarType``."""
    return _NAMES[dtype][0] if dtype in _NAMES else str(dtype).removeprefix("torch.")


def type_meta(dtype: torch.dtype) -> str:
    """``c10::Half``: the name of a ``TypeMeta``."""
    return _NAMES[dtype][1] if dtype in _NAMES else str(dtype).removeprefix("torch.")


def tensor_type(dtype: torch.dtype, *, on_gpu: bool) -> str:
    """``torch.cuda.HalfTensor``: the name of a tensor's type."""
    name = scalar_type(dtype)
    if name not in _LEGACY:
        return f"{'CUDA' if on_gpu else 'CPU'}{name}Type"
    return f"torch.cuda.{name}Tensor" if on_gpu else f"torch.{name}Tensor"


def expected(wanted: torch.dtype, found: torch.dtype) -> RuntimeError:
    """Return the error of ``Tensor::data_ptr<T>`` (core/TensorMethods.cpp)."""
    return RuntimeError(
        f"expected scalar type {scalar_type(wanted)} but found {scalar_type(found)}"
    )
