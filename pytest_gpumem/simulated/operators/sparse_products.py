"""Products of a sparse COO matrix and a dense one, and the transposes that their gradients take.

Source: aten/src/ATen/native/sparse/SparseTensorMath.cpp (_sparse_mm, _sparse_addmm), cuda/
SparseCUDATensorMath.cu (addmm_sparse_dense_cuda, s_addmm_out_sparse_dense_cuda_worker,
_to_csr_int), cuda/SparseBlasLegacy.cpp (s_addmm_out_csr_sparse_dense_cuda_worker) and
native/TensorShape.cpp (transpose, sparse_transpose_), of torch 2.6. The workspace of cuSPARSE's
product is sized by the library; it is left out, with a note of the simulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.libraries import leave_out
from pytest_gpumem.simulated.operators.rules import Composite
from pytest_gpumem.simulated.operators.sparse import is_sparse, refusal

_aten = torch.ops.aten
_MULTIPLIED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def _addmm(
    gpu: GPU, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1
) -> Tensor:
    if not is_sparse(mat1) or is_sparse(mat2) or is_sparse(self):
        raise refusal("addmm of a dense matrix and a sparse one, or of two sparse ones,")
    added = self.expand(mat1.shape[0], mat2.shape[1])
    if mat2.shape[0] != mat1.shape[1]:
        raise RuntimeError(
            f"addmm: Argument #3 (dense): Expected dim 0 size {mat1.shape[1]}, got {mat2.shape[0]}"
        )
    result = added.new_empty((mat1.shape[0], mat2.shape[1]))
    sparse = mat1.coalesce()
    if not sparse._nnz():
        return torch.mul(added, torch.scalar_tensor(beta, dtype=added.dtype), out=result)
    if sparse.dtype not in _MULTIPLIED:
        kind = torch.empty((), dtype=sparse.dtype, device="cpu").type().split(".")[-1]
        raise NotImplementedError(
            f"\"addmm_sparse_cuda\" not implemented for '{kind.removesuffix('Tensor')}'"
        )
    indices = sparse._indices()
    rows = indices.new_empty((mat1.shape[0] + 1,), dtype=torch.int32)
    row_of_each = indices[0].to(torch.int32)
    del row_of_each
    columns = indices[1].to(torch.int32)
    result.zero_() if beta == 0 else result.copy_(added)
    in_columns = result
    if result.stride() != (1, result.shape[0]):
        in_columns = result.t().clone(memory_format=torch.contiguous_format).t_()
    is_read_as_it_is = mat2.stride() == (1, mat2.shape[0]) or (
        mat2.stride(1) == 1 and mat2.stride(0) != mat2.shape[1]
    )
    dense = mat2 if is_read_as_it_is else mat2.contiguous()
    leave_out(gpu, "a sparse product", "cuSPARSE")
    del dense
    if in_columns is not result:
        result.copy_(in_columns)
    del in_columns, columns, rows
    size = list(mat1.shape)
    values = gpu.simulation.values
    values.assign(result, _product, added, indices, sparse._values(), mat2, size, beta, alpha)
    return result


def _product(
    added: Tensor,
    indices: Tensor,
    elements: Tensor,
    dense: Tensor,
    size: list[int],
    beta: float,
    alpha: float,
) -> Tensor:
    sparse = torch.sparse_coo_tensor(indices, elements, size)
    return torch.addmm(added, sparse, dense, beta=beta, alpha=alpha)


def _mm(self: Tensor, mat2: Tensor) -> Tensor:
    if is_sparse(self) and is_sparse(mat2):
        both: Tensor = _aten._sparse_sparse_matmul(self, mat2)
        return both
    dense = mat2 if is_sparse(self) else self
    zeros = dense.new_zeros((self.shape[-2], mat2.shape[-1]))
    if is_sparse(self):
        product: Tensor = _aten._sparse_addmm(zeros, self, mat2, beta=0, alpha=1)
        return product
    turned: Tensor = _aten._sparse_addmm(zeros.mT, mat2.mT, self.mT, beta=0, alpha=1)
    return turned.mT


def _mv(self: Tensor, vec: Tensor) -> Tensor:
    return self.matmul(vec.unsqueeze(-1)).squeeze(-1)


def _transposed(self: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
    if self.dim() != 2 or self.sparse_dim() != 2:
        raise refusal("a transpose of a sparse tensor that is no matrix")
    turned = self.clone()
    if dim0 % 2 == dim1 % 2:
        return turned
    first, second = turned._indices().unbind(0)
    kept = torch.zeros_like(first, memory_format=torch.contiguous_format)
    kept.copy_(first)
    first.copy_(second)
    second.copy_(kept)
    made: Tensor = _aten._sparse_coo_tensor_unsafe(
        turned._indices(), turned._values(), (self.shape[1], self.shape[0])
    )
    return made._coalesced_(False)


PARTS: dict[str, Composite] = {
    "aten._sparse_addmm.default": _addmm,
    "aten.addmm.default": _addmm,
    "aten.mm.default": _mm,
    "aten.mv.default": _mv,
}
"""By overload, where an argument is sparse."""

TRANSPOSES: dict[str, Composite] = {
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
}
"""By overload: views of a dense tensor, copies of a sparse one."""
