"""Requirements of matrix products on the types of their arguments.

Source: aten/src/ATen/native/LinearAlgebra.cpp (ADDMM_META, baddbmm) and cuda/Blas.cpp, torch 2.6 to
2.15.
"""

from __future__ import annotations

from pytest_gpumem.simulated.machine.checks.given import Given
from pytest_gpumem.simulated.machine.checks.kernels import COMPLEX, FLOATING, not_implemented
from pytest_gpumem.simulated.machine.checks.names import (
    expected,
    scalar_type,
    type_meta,
)

_MATMUL = FLOATING | COMPLEX


def product(kernel: str, given: Given) -> Exception | None:
    """Check the type, unless there is nothing to multiply: then CUDA chooses no kernel."""
    if not all(tensor.numel() for tensor in given.tensors()):
        return None
    dtype = given.dtype()
    return None if dtype in _MATMUL else not_implemented(kernel, dtype)


def mm(given: Given) -> Exception | None:
    """``aten::mm``."""
    one, other = given["self"].dtype, given["mat2"].dtype
    if one is not other:
        return RuntimeError(
            f"expected mat1 and mat2 to have the same dtype, but got: {type_meta(one)} != "
            f"{type_meta(other)}"
        )
    return product("addmm_cuda", given)


def addmm(given: Given) -> Exception | None:
    """``aten::addmm``."""
    other = given["mat2"].dtype
    if (wanted := given["out_dtype"]) is not None:
        # _addmm_dtype_out_cuda of ATen/native/cuda/Blas.cpp, since 2.8.
        if given["self"].dtype not in (wanted, given["mat1"].dtype):
            return RuntimeError("self dtype must match either out_dtype or mat1 dtype")
        return product("addmm_cuda", given)
    for name in ("self", "mat1"):
        if given[name].dtype is not other:
            return RuntimeError(
                f"{name} and mat2 must have the same dtype, but got "
                f"{scalar_type(given[name].dtype)} and {scalar_type(other)}"
            )
    return product("addmm_cuda", given)


def bmm(given: Given) -> Exception | None:
    """``aten::bmm``."""
    failure = product("baddbmm_cuda", given)
    one, other = given["self"].dtype, given["mat2"].dtype
    return failure or (None if one is other else expected(one, other))


def baddbmm(given: Given) -> Exception | None:
    """``aten::baddbmm``."""
    types = [given[name].dtype for name in ("self", "batch1", "batch2")]
    if types[0] is not types[1] and given["out_dtype"] is None:
        return RuntimeError(
            f"Input dtypes must be the same, got: input {type_meta(types[0])}, batch1: "
            f"{type_meta(types[1])}, batch2: {type_meta(types[2])}"
        )
    failure = product("baddbmm_cuda", given)
    return failure or (None if types[1] is types[2] else expected(types[1], types[2]))


def addmv(given: Given) -> Exception | None:
    """``aten::addmv``."""
    matrix, vector = list(given.tensors())[-2:]
    failure = product("addmv_impl_cuda", given)
    return failure or (
        None if matrix.dtype is vector.dtype else expected(matrix.dtype, vector.dtype)
    )


def dot(given: Given) -> Exception | None:
    """``aten::dot`` and ``aten::vdot``."""
    one, other = (tensor.dtype for tensor in given.tensors())
    if one is not other:
        return RuntimeError(
            f"dot : expected both vectors to have same dtype, but found {scalar_type(one)} and "
            f"{scalar_type(other)}"
        )
    return product("dot", given)
