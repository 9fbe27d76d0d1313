"""Linear algebra and Fourier transforms: what torch takes for them besides their results.

Copies that the library overwrites, pivots, permutations, arrays of pointers to the matrices of a
batch, and codes of errors, which are looked at afterwards. cuFFT's and cuSOLVER's workspaces are
sized by the libraries; they are left out, with a note of the simulation.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, LinearAlgebra.cpp (_linalg_det), native/cuda/
linalg/BatchLinearAlgebra.cpp, BatchLinearAlgebraLib.cpp and SpectralOps.cpp (_fft_c2r_cufft,
_fft_c2c_cufft). Their order is that of torch's own code on the dry device, 2.13 and 2.15, for
matrices of 4 to 600 rows, alone and in small batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, borrow

_aten = torch.ops.aten
_DIMS_AT_ONCE = 3
"""Dimensions that cuFFT transforms in one call."""


def leave_out(gpu: GPU, operator: str, library: str = "cuSOLVER") -> None:
    """Note that the workspace of ``library`` is in no number."""
    gpu.simulation.note(left_out_note(library, operator))


def left_out_note(library: str, operator: str) -> str:
    """Return a note that the library's workspace is left out."""
    return (
        f"{library}'s workspace for {operator} is unknown and not counted, "
        f"so the peak on a GPU can be higher"
    )


def _complex(gpu: GPU, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "fft", "cuFFT")
    if len(dim) > _DIMS_AT_ONCE:
        # The calls go to and fro between two results.
        borrow(gpu, result.nbytes)


def _to_complex(gpu: GPU, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "rfft", "cuFFT")
    # Not use_optimized_cufft_path.
    if len(dim) > _DIMS_AT_ONCE or (len(dim) > 1 and tuple(dim[:2]) == (0, 1)):
        borrow(gpu, result.nbytes)


def _to_real(gpu: GPU, self: Tensor) -> None:
    # The library overwrites its input.
    leave_out(gpu, "irfft", "cuFFT")
    borrow(gpu, self.nbytes)


def _solved_by_library(operator: str) -> Rule:
    return Rule(after=lambda gpu: leave_out(gpu, operator))


_UNKNOWN = """
    linalg_eig _linalg_eigvals linalg_lu linalg_lstsq _linalg_slogdet geqrf
    linalg_householder_product ormqr linalg_ldl_factor_ex
""".split()
"""Operators of which nothing but their library is known."""

_CODE = 4
"""Bytes of an error, and of a pivot."""


def _count(matrices: Tensor) -> int:
    return matrices.shape[:-2].numel()


def _pointers(gpu: GPU, matrices: Tensor, lists: int) -> None:
    """Take lists of pointers to the matrices of a batch, for a call of cuBLAS."""
    scratch = Scratch(gpu, *[_count(matrices) * INDEX_BYTES] * lists)
    gpu.workspaces.gemm(gpu.stream)
    scratch.free()


def _flags(*, is_single: bool) -> list[int]:
    """_linalg_check_errors: whether any code is not zero; a single one is made a flag first."""
    return [1, 1] if is_single else [1]


_LARGEST_IN_BATCH = 128
"""Rows up to which cuBLAS factorizes a batch at once ..."""
_LARGEST_SINCE_2_15 = 236
"""... and since 2.15 where it has more than two matrices."""


def _factorized(gpu: GPU, matrices: Tensor) -> None:
    count = _count(matrices)
    is_new = gpu.version >= (2, 15) and count > 2
    largest = _LARGEST_SINCE_2_15 if is_new else _LARGEST_IN_BATCH
    if count > 1 and 0 < matrices.shape[-1] <= largest:
        _pointers(gpu, matrices, 1)


def _lu_solved(gpu: GPU, LU: Tensor, adjoint: bool, result: Tensor) -> None:
    leave_out(gpu, "linalg_lu_solve")
    is_copied = result.numel() and not LU.mT.is_contiguous()
    scratch = Scratch(gpu, LU.nbytes if is_copied else 0)
    _by_factors(gpu, LU, result, transposed=adjoint)
    scratch.free()


def _by_factors(gpu: GPU, LU: Tensor, solved: Tensor, *, transposed: bool = False) -> None:
    """lu_solve_kernel: as many right sides as rows are fastest with a triangle after the other."""
    if not solved.numel():
        return
    rows, sides = LU.shape[-1], solved.shape[-1] if solved.dim() >= LU.dim() else 1
    if rows <= 64:
        few, for_cusolver = 8, sides <= 64 or transposed or rows <= 32
    else:
        few, for_cusolver = 2, sides <= 2
    if rows <= (16 if sides == rows else 8):
        _pointers(gpu, LU, 2)
    elif sides == rows or rows > _LARGEST_BY_FACTORS:
        _by_triangles(gpu, LU, solved, transposed=transposed)
    elif for_cusolver and _count(LU) <= 2:
        borrow(gpu, _CODE)
    elif sides <= few:
        _pointers(gpu, LU, 2)
    else:
        _by_triangles(gpu, LU, solved, transposed=transposed)


_LARGEST_BY_FACTORS = 128
"""Rows up to which cuSOLVER or cuBLAS may solve with both factors at once."""
_WITHOUT_POINTERS = 64
"""From so many rows on, cuBLAS solves the triangles of a batch one by one."""


def _by_triangles(gpu: GPU, LU: Tensor, solved: Tensor, *, transposed: bool) -> None:
    """lu_solve_triangular: apply the permutation before or behind both triangles."""
    rows = LU.shape[-1]
    scratch = Scratch(gpu)
    places = rows * INDEX_BYTES
    permutation = _count(LU) * places
    counted = scratch.take(places if _count(LU) > 1 else 0)
    scratch.take(permutation)
    scratch.drop(counted)
    if not transposed:
        scratch.take(places, permutation, solved.nbytes)
    for _ in ("lower", "upper"):
        _pointers(gpu, LU, 2 if rows < _WITHOUT_POINTERS else 0)
    if transposed:
        scratch.take(solved.nbytes)


_BY_COLUMNS = (2, 11)
"""First release that factorizes a copy by columns; before, a matrix of rows is factorized as the
transposed one of columns that it is."""


def _inverted(gpu: GPU, A: Tensor) -> None:
    leave_out(gpu, "linalg_inv_ex")
    if not A.numel():
        return
    scratch = Scratch(gpu, A.nbytes, _count(A) * A.shape[-1] * _CODE)
    _factorized(gpu, A)
    _by_factors(gpu, A, A, transposed=gpu.version < _BY_COLUMNS and A.is_contiguous())
    scratch.free()


def _solved(gpu: GPU, A: Tensor, B: Tensor) -> None:
    leave_out(gpu, "linalg_solve_ex")
    if not A.numel():
        return
    _factorized(gpu, A)
    # Vectors are copied into matrices of one column, in a batch or for triangles.
    is_copied = B.dim() < A.dim() and (A.dim() > 2 or A.shape[-1] > _LARGEST_BY_FACTORS)
    scratch = Scratch(gpu, B.nbytes if is_copied else 0)
    _by_factors(gpu, A, B, transposed=gpu.version < _BY_COLUMNS and A.is_contiguous())
    scratch.free()


def _cholesky(gpu: GPU, self: Tensor) -> None:
    leave_out(gpu, "linalg_cholesky_ex")
    if self.dim() > 2 and self.numel():
        borrow(gpu, _count(self) * INDEX_BYTES)


def _lu_factor(gpu: GPU, A: Tensor) -> None:
    leave_out(gpu, "linalg_lu_factor_ex")
    _factorized(gpu, A)


def _determined(gpu: GPU, A: Tensor) -> None:
    """The error of the factorization, the diagonal's product, and the sign of the permutation."""
    leave_out(gpu, "linalg_det")
    if not A.numel():
        return
    count, rows = _count(A), A.shape[-1]
    scratch = Scratch(gpu, count * _CODE)
    _factorized(gpu, A)
    scratch.take(count * A.element_size())
    places = scratch.take(rows * _CODE)
    moved = scratch.take(count * rows)
    sums = scratch.take(count * INDEX_BYTES)
    borrow(gpu, count * rows * INDEX_BYTES)
    scratch.drop(moved, places, sums)


def _orthogonal(gpu: GPU, A: Tensor) -> None:
    leave_out(gpu, "linalg_qr")
    if not A.numel():
        return
    factors = min(A.shape[-2:])
    scratch = Scratch(gpu, _count(A) * factors * A.element_size())
    if A.dim() > 2:
        _pointers(gpu, A, 2)
    else:
        scratch.borrow(_CODE)
    scratch.borrow(_CODE)


def _singular(gpu: GPU, A: Tensor, compute_uv: bool) -> None:
    leave_out(gpu, "linalg_svd")
    if not A.numel():
        return
    scratch = Scratch(gpu, _count(A) * _CODE)
    overwritten = [A.nbytes]
    if not compute_uv:
        least, rest = min(A.shape[-2:]), A.nbytes // A.shape[-1] // A.shape[-2]
        overwritten += [rest * A.shape[-2] * least, rest * A.shape[-1] * least]
    borrow(gpu, *overwritten)
    borrow(gpu, *_flags(is_single=A.dim() == 2))
    scratch.free()


def _eigen(gpu: GPU, A: Tensor, compute_v: bool) -> None:
    leave_out(gpu, "linalg_eigh")
    if A.numel():
        overwritten = [] if compute_v else [A.nbytes]
        flags = _flags(is_single=A.dim() == 2)
        borrow(gpu, *overwritten, _count(A) * _CODE, *flags)


def _cholesky_inverted(gpu: GPU, self: Tensor) -> None:
    leave_out(gpu, "cholesky_inverse")
    if self.numel() and self.dim() == 2:
        borrow(gpu, self.nbytes, _CODE, self.nbytes)


def _cholesky_solved(gpu: GPU, self: Tensor, input2: Tensor) -> None:
    leave_out(gpu, "cholesky_solve")
    if not self.numel():
        return
    if input2.dim() > 2:
        _pointers(gpu, input2, 2)
        _pointers(gpu, input2, 2)
    else:
        borrow(gpu, _CODE, input2.nbytes)


def _triangular(gpu: GPU, self: Tensor, B: Tensor) -> None:
    if self.numel() and B.numel():
        _pointers(gpu, self, 2 if self.dim() > 2 else 0)


def _keeps_vectors(matrices: Tensor) -> bool:
    """Return whether values alone have a gradient, which takes vectors; on ``meta`` all do."""
    return matrices.requires_grad and torch.is_grad_enabled()


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.linalg_svdvals.default": lambda A, driver=None: _aten._linalg_svd(
        A, False, _keeps_vectors(A), driver=driver
    )[1],
    "aten.linalg_eigvalsh.default": lambda self, UPLO="L": _aten._linalg_eigh(
        self, UPLO, _keeps_vectors(self)
    )[0],
}

RULES = {
    "_fft_c2c": Rule(after=_complex),
    "_fft_r2c": Rule(after=_to_complex),
    "_fft_c2r": Rule(after=_to_real),
    **{name: _solved_by_library(name.lstrip("_")) for name in _UNKNOWN},
    "_linalg_check_errors": Rule(
        after=lambda gpu, info: borrow(gpu, *_flags(is_single=info.numel() == 1))
    ),
    "_linalg_det": Rule(after=_determined),
    # vectors, if there are any, and values
    "_linalg_eigh": Rule(
        outputs=lambda result: result[::-1] if result[1].numel() else result[:1], after=_eigen
    ),
    "_linalg_solve_ex": Rule(after=_solved),
    # u, vh, values
    "_linalg_svd": Rule(outputs=lambda result: (result[0], result[2], result[1]), after=_singular),
    "cholesky_inverse": Rule(after=_cholesky_inverted),
    "cholesky_solve": Rule(after=_cholesky_solved),
    "linalg_cholesky_ex": Rule(after=_cholesky),
    "linalg_inv_ex": Rule(after=_inverted),
    "linalg_lu_factor_ex": Rule(after=_lu_factor),
    "linalg_lu_solve": Rule(after=_lu_solved),
    "linalg_qr": Rule(after=_orthogonal),
    "linalg_solve_triangular": Rule(after=_triangular),
}
