"""Factors, eigenvalues and singular values of matrices: allocations besides the results.

Copies that the library overwrites, pivots, permutations, arrays of pointers to the matrices of a
batch, and error codes, which are checked afterwards. MAGMA, which factorizes some batches up
to 2.13, and finds the eigenvalues of general matrices in 2.6, keeps its arrays on the host.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp (the ``_out`` function of each operator) and
native/cuda/linalg/BatchLinearAlgebra.cpp (lu_factor, geqrf_kernel), BatchLinearAlgebraLib.cpp
(svd_cusolver, apply_orgqr, apply_ormqr) and BatchLinearAlgebraLibBlas.cpp; their order is that of
torch's own code on the dry device, 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, copied
from pytest_gpumem.simulated.operators.libraries import leave_out, solve_with
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, borrow, is_dual

_aten = torch.ops.aten

CODE = 4
"""Bytes of an error code, and of a pivot."""


def count_of(matrices: Tensor) -> int:
    """Return the number of matrices, 1 for a single one (batchCount)."""
    return matrices.shape[:-2].numel()


def is_by_columns(matrices: Tensor) -> bool:
    """Return whether matrices are stored by columns, as libraries read them."""
    return matrices.mT.is_contiguous()


def pointers(gpu: GPU, *matrices: Tensor) -> None:
    """Allocate lists of pointers to the matrices of batches, for a call of cuBLAS."""
    sizes = [count_of(each) * INDEX_BYTES if each.shape[-2:].numel() else 0 for each in matrices]
    with Scratch(gpu, *sizes):
        gpu.workspaces.gemm(gpu.stream)


def check_errors(gpu: GPU, count: int) -> None:
    """Allocate for _linalg_check_errors, which makes a single code a flag first, and reads one."""
    borrow(gpu, *[1, 1] if count == 1 else [1], is_read=True)


def _solve(gpu: GPU, operator: str, routine: str, A: Tensor, times: int = 1) -> None:
    """Call :func:`solve_with` for matrices like those of ``A``, unless they have no elements."""
    if A.numel():
        solve_with(gpu, operator, routine, A.shape[-2], A.shape[-1], A.element_size(), times)


# Triangles: P, L and U.

WITHOUT_MAGMA = (2, 15)
"""First release without MAGMA's factors of batches; 2.13 has them."""


def _is_batch_of_cublas(gpu: GPU, A: Tensor) -> bool:
    """Return whether cuBLAS factorizes all matrices at once; else cuSOLVER does one by one.

    Since 2.15 that depends on the type (get_lu_factor_solver_backend).
    """
    count, rows = count_of(A), A.shape[-1]
    if count == 1 or rows != A.shape[-2]:
        return False
    if gpu.version < WITHOUT_MAGMA:
        return True
    is_single = A.dtype in (torch.float32, torch.complex64)
    if count == 2:
        most = 2 * (8400 if is_single else 2200)
    elif is_single:
        most = 18600 * count
    else:
        most = count * math.isqrt(count) * (16600 if A.dtype is torch.float64 else 5200)
    return rows * rows <= most


def factorize(gpu: GPU, A: Tensor, operator: str, *, pivot: bool = True) -> None:
    """Allocate for linalg_lu_factor_ex into existing results, for ``operator``."""
    if not A.numel():
        return
    count, (rows, columns) = count_of(A), A.shape[-2:]
    is_small = count == 1 or rows <= 16 or (rows <= 128 and count <= 16)
    if gpu.version < WITHOUT_MAGMA and not (rows == columns and is_small):
        gpu.workspaces.gemm(gpu.stream)  # MAGMA's queue has a handle of cuBLAS
    elif _is_batch_of_cublas(gpu, A):
        pointers(gpu, A)
    else:
        _solve(gpu, operator, "getrf", A, count)
    if not pivot:
        borrow(gpu, min(rows, columns) * CODE)


def permutation(scratch: Scratch, count: int, rows: int) -> None:
    """Allocate the permutation that pivots are converted to, in a batch a single row first."""
    row = scratch.take(rows * INDEX_BYTES)
    if count > 1:
        scratch.take(count * rows * INDEX_BYTES)
        scratch.drop(row)


def _unpacked(gpu: GPU, LU_data: Tensor, unpack_pivots: bool) -> None:
    if unpack_pivots:
        permutation(Scratch(gpu), count_of(LU_data), LU_data.shape[-2])


def _lu(gpu: GPU, A: Tensor, pivot: bool) -> None:
    """Allocate both factors in a copy by columns, and take them apart (linalg_lu_out)."""
    count, least = count_of(A), min(A.shape[-2:])
    # A copy that is the same by rows is in the result.
    both = Scratch(gpu, A.nbytes if A.shape[-2:] != (1, 1) else 0)
    with Scratch(gpu, count * least * CODE, count * CODE):
        factorize(gpu, A, "linalg_lu", pivot=pivot)
        both.free()
        _unpacked(gpu, A, pivot)


def _cholesky(gpu: GPU, self: Tensor) -> None:
    if count_of(self) > 1 and self.numel():
        borrow(gpu, count_of(self) * INDEX_BYTES)
    else:
        _solve(gpu, "linalg_cholesky_ex", "potrf", self)


def _cholesky_at_once(gpu: GPU, self: Tensor) -> None:
    """Allocate for the operator that only ``torch.cholesky`` calls, up to 2.13."""
    if self.numel():
        with Scratch(gpu, count_of(self) * CODE):
            _cholesky(gpu, self)
            check_errors(gpu, count_of(self))


# Reflections: Q and R.


def reflect(gpu: GPU, A: Tensor, scales: Tensor, operator: str) -> None:
    """Allocate for geqrf_kernel: cuBLAS for small matrices, else cuSOLVER, with a code."""
    rows = A.shape[-2]
    if rows <= 256 and count_of(A) >= max(2, rows // 16):
        pointers(gpu, A, scales.unsqueeze(-1))
    else:
        with Scratch(gpu, CODE):
            _solve(gpu, operator, "geqrf", A, count_of(A))


def _made_of_reflections(gpu: GPU, operator: str, Q: Tensor, reflections: int) -> None:
    """Allocate for apply_orgqr, into ``Q``."""
    with Scratch(gpu, CODE):
        if Q.shape[-1] == reflections:
            _solve(gpu, operator, "orgqr", Q, count_of(Q))
        else:
            leave_out(gpu, operator)


def _orthogonal(gpu: GPU, A: Tensor, mode: str, result: tuple[Tensor, Tensor]) -> None:
    rows, columns = A.shape[-2:]
    scales = raw.unbacked(A, (*A.shape[:-2], min(rows, columns)))
    scratch = Scratch(gpu, scales.nbytes)
    # The input is overwritten in the larger result.
    if mode == "r" and rows > columns:
        scratch.take(A.nbytes)
    reflect(gpu, A, scales, "linalg_qr")
    if mode != "r" and scales.shape[-1]:
        _made_of_reflections(gpu, "linalg_qr", result[0], scales.shape[-1])


def _from_reflections(gpu: GPU, input: Tensor, tau: Tensor) -> None:
    if tau.shape[-1] and input.numel():
        with Scratch(gpu, *copied(tau)):
            _made_of_reflections(gpu, "linalg_householder_product", input, tau.shape[-1])


def _multiplied(gpu: GPU, self: Tensor, input2: Tensor) -> None:
    leave_out(gpu, "ormqr")
    copies = [0 if is_by_columns(self) else self.nbytes]
    copies.append(0 if input2.is_contiguous() else input2.nbytes)
    borrow(gpu, *copies, CODE)


# Values and vectors.

_SMALL = 32
"""Rows and columns up to which all matrices are decomposed at once (gesvdjBatched)."""


def decompose(
    gpu: GPU, A: Tensor, *, full: bool, compute_uv: bool, driver: str | None = None
) -> None:
    """Allocate for _linalg_svd into existing results: a copy is overwritten, codes are checked."""
    if not A.numel():
        return
    count, (rows, columns), size = count_of(A), A.shape[-2:], A.element_size()
    least, most = min(rows, columns), max(rows, columns)
    overwritten = [A.nbytes]
    if driver == "gesvd":
        # Values of a workspace, and vectors before they are transposed.
        overwritten.append(least * torch.empty(0, dtype=A.dtype).abs().element_size())
        if compute_uv:
            overwritten.append(least * size * least)
    elif driver == "gesvda":
        if not compute_uv:
            overwritten += [count * size * most * least, count * size * least * least]
    elif most <= _SMALL:
        if not compute_uv:
            overwritten += [count * size * rows * rows, count * size * columns * columns]
        elif not full and rows != columns:
            # Its vectors fill square matrices.
            overwritten.append(count * size * most * most)
    elif not compute_uv:
        overwritten += [size * rows * least, size * columns * least]
    with Scratch(gpu, count * CODE):
        with Scratch(gpu, *overwritten):
            if driver in (None, "gesvdj") and most <= _SMALL:
                _solve(gpu, "linalg_svd", "gesvdjBatched", A)
            elif driver in (None, "gesvdj") and not full:
                _solve(gpu, "linalg_svd", "gesvdj", A)
            else:
                leave_out(gpu, "linalg_svd")
        if driver != "gesvd":
            gpu.copies()  # whether it converged (_check_gesvdj_convergence)
        check_errors(gpu, count)


def _singular(
    gpu: GPU,
    A: Tensor,
    full_matrices: bool,
    compute_uv: bool,
    driver: str | None,
    result: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Decompose; complex right vectors are marked as conjugates of cuSOLVER's (svd_kernel)."""
    decompose(gpu, A, full=full_matrices, compute_uv=compute_uv, driver=driver)
    if compute_uv and A.is_complex():
        torch._C._set_conj(result[2], True)


def _symmetric(gpu: GPU, A: Tensor, compute_v: bool) -> None:
    leave_out(gpu, "linalg_eigh")
    if A.numel():
        with Scratch(gpu, 0 if compute_v else A.nbytes, count_of(A) * CODE):
            check_errors(gpu, count_of(A))


def _is_finite(gpu: GPU, self: Tensor) -> None:
    """Allocate for isfinite() of a matrix, of complex ones by parts, and all()."""
    flags = self.numel()
    absolute = flags * self.element_size() // (2 if self.is_complex() else 1)
    scratch = Scratch(gpu)
    for _ in range(2 if self.is_complex() else 1):
        sizes, unequal, equal = (scratch.take(each) for each in (absolute, flags, flags))
        finite = scratch.take(flags)
        scratch.drop(equal, unequal, sizes)
    if self.is_complex():
        scratch.drop(finite)
    borrow(gpu, 1, is_read=True)


_ON_DEVICE = (2, 10)
"""First release in which cuSOLVER finds eigenvalues of general matrices (tried on 2.6 and 2.10)."""


def _general(gpu: GPU, self: Tensor, values: Tensor, vectors: Tensor | None) -> Iterator[Tensor]:
    """Yield the results, which are copied from others of the same size (linalg_eig_out_info).

    Real matrices have real vectors first, and the parts of values. MAGMA has these on the host.
    """
    leave_out(gpu, "linalg_eigvals" if vectors is None else "linalg_eig")
    if vectors is not None:
        _is_finite(gpu, self)
    if gpu.version < _ON_DEVICE:
        yield values
        if vectors is not None:
            yield vectors
        return
    count = count_of(self)
    scratch = Scratch(gpu)
    codes = scratch.take(max(1, count) * CODE)
    other_vectors = scratch.take(0 if vectors is None else vectors.nbytes)
    other_values = scratch.take(values.nbytes)
    is_real = not self.is_complex()
    parts = scratch.take(values.nbytes if is_real else 0)
    real_vectors = scratch.take(self.nbytes if is_real and vectors is not None else 0)
    borrow(gpu, 0 if is_by_columns(self) else self.nbytes)
    if is_real:
        flags = scratch.take(values.numel())
        borrow(gpu, 1, is_read=True)
        scratch.drop(flags, real_vectors, parts)
    yield values
    if vectors is not None:
        yield vectors
    scratch.drop(other_vectors, other_values)
    check_errors(gpu, max(1, count))
    scratch.drop(codes)


def _keeps_vectors(matrices: Tensor) -> bool:
    """Return whether a gradient of the values needs vectors; on ``meta`` they are always made."""
    return (matrices.requires_grad and torch.is_grad_enabled()) or is_dual(matrices)


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.linalg_eigvals.default": lambda self: (
        _aten.linalg_eig(self)[0] if _keeps_vectors(self) else _aten._linalg_eigvals(self)
    ),
    "aten.linalg_svdvals.default": lambda A, driver=None: _aten._linalg_svd(
        A, False, _keeps_vectors(A), driver=driver
    )[1],
    "aten.linalg_eigvalsh.default": lambda self, UPLO="L": _aten._linalg_eigh(
        self, UPLO, _keeps_vectors(self)
    )[0],
}

RULES = {
    "linalg_ldl_factor_ex": Rule(
        after=lambda gpu, self: _solve(gpu, "linalg_ldl_factor_ex", "sytrf", self)
    ),
    "_linalg_check_errors": Rule(after=lambda gpu, info: check_errors(gpu, info.numel())),
    "_linalg_eigvals": Rule(outputs=lambda gpu, self, result: _general(gpu, self, result, None)),
    # vectors, if there are any, and values
    "_linalg_eigh": Rule(
        outputs=lambda result: result[::-1] if result[1].numel() else result[:1], after=_symmetric
    ),
    # u, vh, values
    "_linalg_svd": Rule(outputs=lambda result: (result[0], result[2], result[1]), after=_singular),
    "cholesky": Rule(after=_cholesky_at_once),
    "geqrf": Rule(after=lambda gpu, result: reflect(gpu, result[0], result[1], "geqrf")),
    "linalg_cholesky_ex": Rule(after=_cholesky),
    "linalg_eig": Rule(outputs=lambda gpu, self, result: _general(gpu, self, *result)),
    "linalg_householder_product": Rule(after=_from_reflections),
    "linalg_lu": Rule(after=_lu),
    "linalg_lu_factor_ex": Rule(
        after=lambda gpu, A, pivot: factorize(gpu, A, "linalg_lu_factor_ex", pivot=pivot)
    ),
    "linalg_qr": Rule(after=_orthogonal),
    "lu_unpack": Rule(after=_unpacked),
    "ormqr": Rule(after=_multiplied),
}
