"""Systems of linear equations and least squares: allocations besides the results.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp (linalg_solve_triangular_out,
linalg_lstsq_out_info, linalg_ldl_solve_out) and native/cuda/linalg/BatchLinearAlgebra.cpp
(triangular_solve_kernel, lu_solve_kernel, linalg_lstsq_gels, lstsq_kernel,
_cholesky_solve_helper_cuda, cholesky_inverse_kernel_impl); their order is that of torch's own code
on the dry device, 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.factorizations import (
    CODE,
    check_errors,
    count_of,
    factorize,
    is_by_columns,
    permutation,
    pointers,
    reflect,
)
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES
from pytest_gpumem.simulated.operators.libraries import leave_out
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow


def _expanded(matrices: Tensor, like: Tensor) -> Tensor:
    """Return ``matrices`` for each of the batch of ``like``."""
    return matrices.expand((*like.shape[:-2], *matrices.shape[-2:]))


def _right_sides(A: Tensor, b: Tensor) -> Tensor:
    is_vector = b.dim() == 1 or (b.dim() == A.dim() - 1 and b.shape == A.shape[:-1])
    return b.unsqueeze(-1) if is_vector else b


# Triangles.

_ONE_BY_ONE = 64
"""Rows from which cuBLAS solves up to eight triangles one by one, without pointers."""
_OF_MAGMA = 512
"""Rows above which up to 2.10 MAGMA solves others, with pointers on the host."""


def triangles(gpu: GPU, A: Tensor, B: Tensor) -> None:
    """Allocate for triangular_solve_kernel, with matrices as the library reads them."""
    rows = A.shape[-1]
    is_of_magma = rows > _OF_MAGMA and gpu.version < (2, 11)
    if is_of_magma or (count_of(A) <= 8 and rows >= _ONE_BY_ONE):
        gpu.workspaces.gemm(gpu.stream)
    else:
        pointers(gpu, A, B)


def _solve_triangular(gpu: GPU, A: Tensor, solved: Tensor, *, by_columns: bool = True) -> None:
    """Allocate for linalg_solve_triangular_out: triangles by neither rows nor columns are copied.

    So are conjugates by columns if there is a result by columns, too.
    """
    given = _expanded(A, solved)
    is_conjugate = by_columns and given.is_conj() and is_by_columns(given)
    is_ready = (is_by_columns(given) or given.is_contiguous()) and not is_conjugate
    with Scratch(gpu, 0 if is_ready else given.nbytes):
        triangles(gpu, given, solved)


# With the factors of LU.

_LARGEST_BY_FACTORS = 128
"""Rows up to which cuSOLVER or cuBLAS may solve with both factors at once."""


def _lu_solved(gpu: GPU, LU: Tensor, left: bool, adjoint: bool, result: Tensor) -> None:
    leave_out(gpu, "linalg_lu_solve")
    _by_factors(gpu, LU, result, left=left, adjoint=adjoint)


def _by_factors(
    gpu: GPU, LU: Tensor, result: Tensor, *, left: bool = True, adjoint: bool = False
) -> None:
    """Allocate for linalg_lu_solve_out; from the right it solves the transposed system.

    As many right sides as rows are fastest with a triangle after the other (lu_solve_kernel).
    """
    if not result.numel():
        return
    solved = result if left else result.mT
    transposed = adjoint == left
    scratch = Scratch(gpu, 0 if is_by_columns(LU) else LU.nbytes)
    rows, sides = LU.shape[-1], solved.shape[-1]
    if rows <= 64:
        few, for_cusolver = 8, sides <= 64 or transposed or rows <= 32
    else:
        few, for_cusolver = 2, sides <= 2
    solve: Callable[..., None] | None = pointers
    is_square_or_large = sides == rows or rows > _LARGEST_BY_FACTORS
    if rows > (16 if sides == rows else 8):
        if not is_square_or_large and for_cusolver and count_of(solved) <= 2:
            borrow(gpu, CODE)
            solve = None
        elif is_square_or_large or sides > few:
            solve = partial(_by_triangles, transposed=transposed)
    if solve is not None:
        # maybe_expand_lu, maybe_expand_pivots
        is_given = count_of(LU) == count_of(solved)
        every = count_of(solved) * rows
        scratch.take(*[] if is_given else [every * rows * LU.itemsize, every * CODE])
        solve(gpu, raw.unbacked(LU, (*solved.shape[:-2], rows, rows)), solved)


def _by_triangles(gpu: GPU, LU: Tensor, solved: Tensor, *, transposed: bool) -> None:
    """Allocate for lu_solve_triangular: the permutation comes before or after both triangles."""
    rows = LU.shape[-1]
    places = rows * INDEX_BYTES
    scratch = Scratch(gpu)
    permutation(scratch, count_of(LU), rows)
    if not transposed:
        scratch.take(places, count_of(LU) * places, solved.nbytes)
    for _ in ("lower", "upper"):
        triangles(gpu, LU, solved)
    if transposed:
        scratch.take(solved.nbytes)


_BY_COLUMNS = (2, 11)
"""First release that factorizes a copy by columns; before, a matrix of rows is factorized as the
transposed one of columns that it is."""


def _is_turned(gpu: GPU, A: Tensor) -> bool:
    return gpu.version < _BY_COLUMNS and A.is_contiguous() and not A.is_complex()


def _inverted(gpu: GPU, A: Tensor) -> None:
    if not A.numel():
        return
    with Scratch(gpu, A.nbytes, count_of(A) * A.shape[-1] * CODE):
        factorize(gpu, A, "linalg_inv_ex")
        made = raw.unbacked(A, A.mT.shape).mT
        _by_factors(gpu, made, made, adjoint=_is_turned(gpu, A))


def _solved(gpu: GPU, A: Tensor, B: Tensor, left: bool) -> None:
    factorize(gpu, A, "linalg_solve_ex")
    sides = _right_sides(A, B)
    batch = torch.broadcast_shapes(A.shape[:-2], sides.shape[:-2])
    solution = raw.unbacked(sides, (*batch, *sides.shape[-2:]))
    # Vectors are copied into matrices of one column.
    factors = raw.unbacked(A, A.mT.shape).mT
    with Scratch(gpu, solution.nbytes if sides is not B else 0):
        _by_factors(gpu, factors, solution, left=left, adjoint=_is_turned(gpu, A))


# With a Cholesky factor.

_BY_TRIANGLES = (2, 13)
"""First release in which two triangles solve a batch, and an inverse is a solution (2.11: not)."""


def _by_root(gpu: GPU, A: Tensor, solved: Tensor, *, upper: bool) -> None:
    """Allocate for _cholesky_solve_helper_cuda: one by cuSOLVER, a batch by two triangles.

    Before 2.13, MAGMA solves a batch with copies of the factors.
    """
    given = _expanded(A, solved)
    if count_of(solved) == 1:
        borrow(gpu, CODE, given.nbytes)
    elif gpu.version < _BY_TRIANGLES:
        with Scratch(gpu, given.nbytes):
            gpu.workspaces.gemm(gpu.stream)
    else:
        lower = given.mH if upper else given
        _solve_triangular(gpu, lower, solved)
        _solve_triangular(gpu, lower.mH, solved)


def _cholesky_inverted(gpu: GPU, self: Tensor, upper: bool) -> None:
    """The solution for ones, with a copy of the factor, which up to 2.11 is the only one."""
    leave_out(gpu, "cholesky_inverse")
    with Scratch(gpu, self.nbytes):
        if gpu.version >= _BY_TRIANGLES:
            copy = raw.unbacked(self, self.mT.shape).mT
            _by_root(gpu, copy, copy, upper=upper)
        elif count_of(self) == 1:
            borrow(gpu, CODE)
        else:
            gpu.workspaces.gemm(gpu.stream)


def _cholesky_solved(gpu: GPU, input2: Tensor, upper: bool, result: Tensor) -> Iterator[Tensor]:
    """Yield the result, which up to 2.11 comes after the code of a single one."""
    leave_out(gpu, "cholesky_solve")
    if gpu.version >= _BY_TRIANGLES or count_of(result) != 1:
        yield result
        _by_root(gpu, input2, result, upper=upper)
        return
    with Scratch(gpu, CODE):
        yield result
        borrow(gpu, _expanded(input2, result).nbytes)


def _symmetric(gpu: GPU, LD: Tensor, pivots: Tensor, result: Tensor) -> None:
    leave_out(gpu, "linalg_ldl_solve")
    if LD.numel() and result.numel():
        copied = 0 if is_by_columns(LD) else LD.nbytes
        borrow(gpu, copied, pivots.numel() * INDEX_BYTES, CODE)


# Least squares.

_Fit = tuple[Tensor, Tensor, Tensor, Tensor]
"""Solution, residuals, rank and singular values, the last two of no elements."""


def _made(self: Tensor, sides: Tensor) -> Tensor:
    """Return room for right sides and solutions, whichever has more rows, by columns."""
    batch = torch.broadcast_shapes(self.shape[:-2], sides.shape[:-2])
    shape = (*batch, sides.shape[-1], max(self.shape[-2:]))
    return raw.unbacked(self, shape).mT


def _fit(self: Tensor, b: Tensor, driver: str | None) -> _Fit:
    """Make the results.

    Raises ``RuntimeError`` in torch's words for a ``driver`` that only the CPU has.
    """
    if driver not in (None, "gels"):
        raise RuntimeError(
            "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA"
        )
    sides = _right_sides(self, b)
    rows, columns = self.shape[-2:]
    made = _made(self, sides)
    solution = made.narrow(-2, 0, columns)
    nothing = raw.unbacked(made.real, (0,))
    residuals = made.real[..., 0, :] if rows > columns else nothing
    return (
        solution.squeeze(-1) if sides is not b else solution,
        raw.unbacked(residuals, residuals.shape),
        nothing.long(),
        nothing,
    )


def _least_squares(gpu: GPU, self: Tensor, b: Tensor, result: _Fit) -> Iterator[Tensor]:
    """Yield solution, residuals of rows that are more than columns, and what has no elements."""
    leave_out(gpu, "linalg_lstsq")
    rows, columns = self.shape[-2:]
    sides = _right_sides(self, b)
    codes = Scratch(gpu, max(1, count_of(self)) * CODE)
    solution, residuals = result[:2]
    made = _made(self, sides)
    solution.untyped_storage().resize_(made.nbytes)
    yield solution
    copy = Scratch(gpu, self.nbytes)
    if self.numel() and sides.numel():
        given = raw.unbacked(self, self.mT.shape).mT
        if columns <= rows <= 256 and count_of(made) >= max(2, rows // 16):
            every = _expanded(given, made)
            with Scratch(gpu, every.nbytes):
                pointers(gpu, every, made)
        else:
            _by_reflections(gpu, given, made)
    if self.is_complex():
        # Complex rows that are left are multiplied by their conjugates.
        borrow(gpu, residuals.numel() * (rows - columns) * self.element_size())
    yield residuals
    copy.free()
    check_errors(gpu, max(1, count_of(self)))
    codes.free()
    yield from result[2:]


def _by_reflections(gpu: GPU, A: Tensor, made: Tensor) -> None:
    """Allocate for linalg_lstsq_gels: Q times the right sides and then R, or the reverse."""
    scales = raw.unbacked(A, (*A.shape[:-2], min(A.shape[-2:])))
    scratch = Scratch(gpu, scales.nbytes)
    is_tall = A.shape[-2] >= A.shape[-1]
    scratch.take(0 if is_tall else A.nbytes)
    reflected = A if is_tall else raw.unbacked(A, A.shape).mT
    reflect(gpu, reflected, scales, "linalg_lstsq")
    every = _expanded(reflected, made)
    is_copied = not is_by_columns(every)
    scratch.take(every.nbytes if is_copied else 0)
    copied_scales = count_of(made) * scales.shape[-1] * A.element_size() if is_copied else 0
    if is_tall:
        scratch.take(copied_scales)
        borrow(gpu, CODE)
        triangles(gpu, every, made)
    else:
        triangles(gpu, every, made)
        scratch.take(copied_scales)
        borrow(gpu, CODE)


RULES = {
    "_linalg_solve_ex": Rule(after=_solved),
    "cholesky_inverse": Rule(after=_cholesky_inverted),
    "cholesky_solve": Rule(outputs=_cholesky_solved),
    "linalg_inv_ex": Rule(after=_inverted),
    "linalg_ldl_solve": Rule(after=_symmetric),
    "linalg_lstsq": Rule(shapes=_fit, outputs=_least_squares),
    "linalg_lu_solve": Rule(after=_lu_solved),
    "linalg_solve_triangular": Rule(
        after=lambda gpu, self, result: _solve_triangular(gpu, self, result, by_columns=False)
    ),
    # the solution and a copy of the triangle
    "triangular_solve": Rule(after=lambda gpu, result: triangles(gpu, result[1], result[0])),
}
