"""Sparse COO tensors, run by the strided operators that CUDA's functions are made of.

Kernels for ``meta`` get shapes wrong: a clone, a copy and a sum have no elements there. Operators
missing here have no shapes on ``meta`` either, and are refused by name. The workspace of cuSPARSE's
product is sized by the library; it is left out, with a note of the simulation.

Source: aten/src/ATen/native/sparse/SparseTensor.cpp (clone_sparse, copy_into_sparse, sparse_mask),
SparseTensorMath.cpp (intersection_binary_op_sparse_dense_out, add_sparse, _sparse_mm,
_sparse_addmm), FlattenIndicesCommon.h, SparseBinaryOpIntersectionCommon.h,
cuda/SparseCUDATensor.cu (_coalesce_sparse_cuda) and SparseCUDATensorMath.cu (add_out_sparse_cuda,
add_out_dense_sparse_cuda, addmm_sparse_dense_cuda, s_addmm_out_sparse_dense_cuda_worker,
_to_csr_int), cuda/SparseBlasLegacy.cpp
(s_addmm_out_csr_sparse_dense_cuda_worker), native/TensorConversions.cpp (dense_to_sparse,
sparse_to_dense), native/TensorShape.cpp (transpose, sparse_transpose_),
native/EmbeddingBag.cpp (_embedding_bag_sparse_backward, apply_bag_size_backward),
torch/csrc/autograd/functions/accumulate_grad.h, of torch 2.6.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.signatures import Args
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.libraries import leave_out
from pytest_gpumem.simulated.operators.rules import Composite, Scratch
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

_aten = torch.ops.aten
_ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_ACCUMULATES = Operator.of(_aten.index_put_.default)
_MERGE_SORT_TILE = 256 * 8
"""Threads and 8-byte keys of each: cub/device/dispatch/dispatch_merge_sort.cuh."""


def is_sparse(value: Any) -> bool:
    """Return whether ``value`` is a sparse COO tensor."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _made(
    indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool | None = None
) -> Tensor:
    """Return a sparse tensor of the shape of ``like``, by default as coalesced as that."""
    made: Tensor = _aten._sparse_coo_tensor_unsafe(indices, values, like.shape)
    return made._coalesced_(like.is_coalesced() if coalesced is None else coalesced)


def _become(tensor: Tensor, result: Tensor) -> Tensor:
    """Give ``tensor`` the indices and values of ``result``, as ``alias_into_sparse`` does."""
    tensor.data = result
    return tensor


def _clone(self: Tensor) -> Tensor:
    indices, values = self._indices(), self._values()
    node = torch._C._current_autograd_node()
    is_kept = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    if is_kept and indices.is_contiguous() and values.is_contiguous():
        # A leaf takes the gradient's own parts. Here Python holds them too, and torch would copy.
        return _made(indices, values, self)
    values = values.clone()  # the last argument of C++ first
    return _made(indices.clone(), values, self)


def copy_(target: Tensor, source: Tensor) -> Tensor:
    """Run ``target.copy_(source)`` of two sparse tensors of one GPU."""
    if not (is_sparse(target) and is_sparse(source)):
        raise UnsupportedOperatorError(
            f"copy_ between a sparse and a dense tensor at {user_line()} cannot run on a simulated "
            "GPU"
        )
    return _become(target, converted(source, target.dtype))


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a copy of ``tensor`` with elements of ``dtype``, or of its own type."""
    indices = tensor._indices().clone()
    return _made(indices, tensor._values().to(dtype or tensor.dtype, copy=True), tensor)


def _flattened(gpu: GPU, tensor: Tensor, *, clone: bool) -> Tensor:
    """Return an index for each element, as ``flatten_indices`` does."""
    indices = tensor._indices()
    dims = indices.shape[0]
    if dims == 1:
        only = indices.squeeze(0)
        return only.clone(memory_format=torch.contiguous_format) if clone else only
    values = gpu.simulation.values
    flat = torch.arange(indices.shape[1], device=indices.device)
    known = values.known(indices)
    values.forget(storage_key(flat))
    if known is not None:
        with torch._C._DisableTorchDispatch():
            found = torch.zeros(known.shape[1], dtype=torch.int64, device="cpu")
            for at, size in enumerate(tensor.shape[:dims]):
                found = found * size + known[at]
        values.keep(flat, found)
    return flat


def _coalesce(gpu: GPU, self: Tensor) -> Tensor:
    count, dims = self._nnz(), self.sparse_dim()
    if count < 2:
        return _clone(self)._coalesced_(True)
    simulation = gpu.simulation
    values = self._values()
    flat = _flattened(gpu, self, clone=True)
    origins, offsets = (flat.new_empty(count) for _ in range(2))
    known = simulation.values.known(flat)
    if known is None:
        raise UnknownValueError(simulation.values.refusal(f"coalesce() at {user_line()} reads"))
    _sort(gpu, count)
    gpu.waits()
    with torch._C._DisableTorchDispatch():
        unique, group = known.unique(return_inverse=True)
    found = len(unique)
    flat.resize_((1, found))
    summed = values.new_empty((found, *values.shape[1:]))
    indices = flat if dims == 1 else flat.new_empty((dims, found))
    del origins, offsets
    contents = simulation.values.known(values)
    with torch._C._DisableTorchDispatch():
        places = torch.stack(torch.unravel_index(unique, self.shape[:dims]))
        simulation.values.keep(indices, places)
        if contents is not None:
            wide = contents.to(_ACCUMULATED_IN.get(contents.dtype, contents.dtype))
            sums = wide.new_zeros((found, *contents.shape[1:]))
            simulation.values.keep(summed, sums.index_add_(0, group, wide))
    return _made(indices, summed, self, coalesced=True)


def _sort(gpu: GPU, count: int) -> None:
    """Allocate for Thrust: a merge sort of pairs, and finding the first of each key."""
    partitions = (1 + -(-count // _MERGE_SORT_TILE)) * 4
    of_sort = cub.alias_temporaries(partitions, count * 8, count * 8, 0)
    capability = gpu.model.compute_capability
    for nbytes in (of_sort, cub.thrust_unique_by_key_bytes(count, capability, gpu.version)):
        Scratch(gpu).estimate(nbytes, "Thrust", "coalesce")


def _add(gpu: GPU, self: Tensor, other: Tensor, alpha: float) -> Tensor:
    dtype = torch.result_type(self, other)
    if not is_sparse(self):
        result = self.new_empty(self.shape, dtype=dtype).copy_(self)
        return _scatter(gpu, result, other, alpha)
    if not is_sparse(other):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if not other._nnz():
        return _clone(self)
    added = other._values().to(dtype)
    if alpha != 1:
        added = added.mul(alpha)
    if not self._nnz():
        return _made(other._indices().clone(), added, self, coalesced=other.is_coalesced())
    indices = torch.cat([self._indices(), other._indices()], 1)
    values = torch.cat([self._values().to(dtype), added], 0)
    result = _made(indices, values, self, coalesced=False)
    del indices, values, added
    return _coalesce(gpu, result) if result._nnz() > self.numel() else result


def _add_(gpu: GPU, self: Tensor, other: Tensor, alpha: float) -> Tensor:
    if is_sparse(self):
        return _become(self, _add(gpu, self, other, alpha))
    return _scatter(gpu, self, other, alpha)


def _scatter(gpu: GPU, dense: Tensor, sparse: Tensor, alpha: float) -> Tensor:
    """Add ``sparse`` to ``dense``, in place."""
    if dense.shape != sparse.shape:
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same size, but self has size "
            f"{list(dense.shape)} while other has size {list(sparse.shape)} (FYI: dense-sparse "
            "addition does not currently support broadcasting)"
        )
    if not sparse._nnz():
        return dense
    values = sparse._values().to(dense.dtype)
    dims = sparse.sparse_dim()
    if not sparse.is_coalesced():
        flat = _flattened(gpu, sparse, clone=False)
        rows, columns = math.prod(dense.shape[:dims]), math.prod(dense.shape[dims:])
        dense.view(rows, columns).index_add_(
            0, flat, values.reshape(sparse._nnz(), columns), alpha=alpha
        )
        return dense
    # One kernel, which takes no memory.
    known = gpu.simulation.values
    places, contents = known.known(sparse._indices()), known.known(values)
    with torch._C._DisableTorchDispatch():
        if places is None or contents is None:
            known.forget(storage_key(dense))
        else:
            written = (dense, list(places.unbind(0)), contents * alpha, True)
            known.follow(_ACCUMULATES, written, {}, dense)
    return dense


def _to_dense(gpu: GPU, self: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None:
        raise RuntimeError("dtype argument is not supported by sparse_to_dense")
    dense = torch.zeros(self.shape, dtype=self.dtype, device=self._values().device)
    return _scatter(gpu, dense, self, 1)


def _to_sparse(
    self: Tensor,
    sparse_dim: int | None = None,
    layout: torch.layout | None = None,
    dense_dim: int | None = None,
) -> Tensor:
    dims = self.dim() - (dense_dim or 0) if sparse_dim is None else sparse_dim
    if layout not in (None, torch.sparse_coo) or dims != self.dim() or not dims:
        raise UnsupportedOperatorError(
            f"to_sparse at {user_line()} cannot run on a simulated GPU with dense dimensions, "
            "without any dimension or to a compressed layout"
        )
    return _aten._to_sparse.sparse_dim._op_dk(torch._C.DispatchKey.CPU, self, dims)  # type: ignore[no-any-return]  # an operator


def _sparse_mask(gpu: GPU, self: Tensor, mask: Tensor) -> Tensor:
    if not is_sparse(self):
        return _aten.sparse_mask.default._op_dk(torch._C.DispatchKey.SparseCPU, self, mask)  # type: ignore[no-any-return]  # an operator
    if not self.is_coalesced():
        raise refusal("sparse_mask of a sparse tensor that is not coalesced")
    indices, count, own = mask._indices(), mask._nnz(), self._nnz()
    if not (count and own):
        return _clone(mask)
    # Places, a hash of each element of its own, and what of the mask is among them.
    hashed = [indices.new_empty(size) for size in (max(own, count), own, 2 * count)]
    indices.new_empty(1)
    given = self._values()
    kept, values = indices.clone(), given.new_empty((count, *given.shape[1:]))
    del hashed
    gpu.simulation.values.assign(values, _masked, self._indices(), given, indices, list(self.shape))
    return _made(kept, values, mask)


def _masked(indices: Tensor, elements: Tensor, places: Tensor, size: list[int]) -> Tensor:
    """Return those of a coalesced tensor's ``elements`` that are at ``places``, else zeros."""
    sparse = torch.sparse_coo_tensor(indices, elements, size)._coalesced_(True)
    zeros = elements.new_zeros((places.shape[1], *elements.shape[1:]))
    return sparse.sparse_mask(torch.sparse_coo_tensor(places, zeros, size))._values()


def _mul(self: Tensor, other: Tensor) -> Tensor:
    sparse, factor = (self, other) if is_sparse(self) else (other, self)
    if is_sparse(factor):
        raise refusal("mul of two sparse tensors")
    values = sparse._values()
    if isinstance(factor, Tensor) and factor.dim():
        if factor.shape != sparse.shape:
            raise refusal("mul of a sparse and a dense tensor of other sizes")
        factor = factor[tuple(sparse._indices().unbind(0))]
    return _made(sparse._indices().clone(), torch.mul(factor, values), sparse)


def _div(self: Tensor, other: Tensor) -> Tensor:
    if isinstance(other, Tensor) and other.dim():
        raise RuntimeError(
            "Sparse division requires a scalar or zero-dim dense tensor divisor (got shape "
            f"{list(other.shape)} for divisor)"
        )
    return _made(self._indices().clone(), self._values() / other, self)


def _neg(self: Tensor) -> Tensor:
    copied = _clone(self)
    copied._values().neg_()
    return copied


def refusal(what: str) -> UnsupportedOperatorError:
    """Return the refusal of the operation ``what``, which sparse tensors can do on a GPU."""
    return UnsupportedOperatorError(f"{what} at {user_line()} cannot run on a simulated GPU")


def _refuse(name: str) -> Tensor:
    raise refusal(f"{name} of a sparse tensor")


def is_in_parts(name: str, args: Args) -> bool:
    """Return whether an operator of ``PARTS`` has sparse arguments, or a sparse result."""
    if name == "aten._embedding_bag_backward.default":
        return bool(args[9])  # its argument ``sparse``
    return any(map(is_sparse, args)) or name.startswith("aten._to_sparse")


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


def _transposed(self: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
    if self.dim() != 2 or self.sparse_dim() != 2:
        raise refusal("a transpose of a sparse tensor that is no matrix")
    explicit = torch._C.DispatchKey.CompositeExplicitAutograd
    return _aten.transpose.int._op_dk(explicit, self, dim0, dim1)  # type: ignore[no-any-return]  # an operator


PARTS: dict[str, Composite] = {
    "aten.add.Tensor": _add,
    "aten.add_.Tensor": _add_,
    "aten.clone.default": _clone,
    "aten._coalesce.default": _coalesce,
    # Of a bag whose rows' gradients are sparse.
    "aten._embedding_bag_backward.default": lambda *args: _aten._embedding_bag_sparse_backward(
        *args[:5], *args[6:9], *args[10:]
    ),
    "aten.div.Tensor": _div,
    "aten.div_.Tensor": lambda self, other: _become(self, _div(self, other)),
    "aten.mul.Tensor": _mul,
    "aten.mul_.Tensor": lambda self, other: _become(self, _mul(self, other)),
    "aten.neg.default": _neg,
    "aten.sparse_mask.default": _sparse_mask,
    "aten.sum.default": lambda self, dtype: self._values().sum(dtype=dtype),
    "aten._to_dense.default": _to_dense,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    # meta has kernels for these, which count no elements.
    "aten.add.out": partial(_refuse, "add(out=)"),
    "aten.copy_sparse_to_sparse_.default": partial(_refuse, "copy_sparse_to_sparse_"),
    "aten.isinf.default": partial(_refuse, "isinf"),
    "aten._sparse_addmm.default": _addmm,
    "aten.addmm.default": _addmm,
    "aten.mm.default": lambda self, mat2: _aten._sparse_mm(self, mat2),
    "aten.mv.default": lambda self, vec: self.matmul(vec.unsqueeze(-1)).squeeze(-1),
}
"""By overload, where an argument is sparse, or the result is."""

TRANSPOSES: dict[str, Composite] = {
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
}
"""By overload: views of a dense tensor, copies of a sparse one."""
