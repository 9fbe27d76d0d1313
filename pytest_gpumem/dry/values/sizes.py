"""Operators whose host code reads a number of elements from the device, and these numbers.

Source, torch 2.6 to 2.15: aten/src/ATen/native/cuda/Nonzero.cu (nonzero_cuda_out_impl),
Unique.cu (compute_unique, unique_dim_cuda_template), Repeat.cu and native/Repeat.cpp
(repeat_interleave_common), native/IndexingUtils.h (expandTensors), cuda/IndexKernel.cpp
(masked_select_out_cuda_impl), cuda/SummaryOps.cu (_bincount_cuda_template, _histc_cuda_template),
native/Distributions.cpp (multinomial_out), native/DistributionTemplates.h (normal_impl),
native/BatchLinearAlgebra.cpp (linalg_eig_out, linalg_eigvals_out), native/cuda/TensorMode.cpp and
TensorModeKernel.cu (ModeImpl); of sparse tensors, native/sparse/cuda/SparseCUDATensor.cu
(_coalesce_sparse_cuda reads how many indices differ) and native/TensorConversions.cpp
(dense_to_sparse takes ``nonzero``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, named
from pytest_gpumem.simulated.machine.storages import parts_of_sparse
from pytest_gpumem.simulated.machine.values.assumptions import is_printing
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator

_MASKS = (torch.bool, torch.uint8)
_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
_ALONG = ("unique_dim", "unique_dim_consecutive")
_COUNTING = (
    *("nonzero", "_unique", "_unique2", "unique_consecutive", "repeat_interleave", "bincount"),
    *("masked_select", "multinomial", "normal", "mode"),
)
_EIGEN = ("linalg_eig", "_linalg_eigvals")
NAMES = frozenset(f"aten::{name}" for name in (*_COUNTING, *_ALONG, *_INDEXING, *_EIGEN))


def numbers_read(
    values: Values, operator: Operator, args: Args, kwargs: Kwargs
) -> Sequence[int] | None:
    """Return the numbers that torch's own code reads from the device in this call, in order.

    Empty if it reads none, ``None`` if they depend on unknown values.
    """
    name = operator.name.removeprefix("aten::")
    if name in _INDEXING:
        return _counted(values, args[1])
    if name == "masked_select":
        tensor, mask = args[:2]
        return _counted(values, [mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape))])
    if name == "multinomial":
        return [1, 0]  # valid probabilities; and no row that is all zeros
    if name == "normal":
        deviation = named(operator.func, args, kwargs).get("std")
        known = values.known(deviation) if isinstance(deviation, torch.Tensor) else None
        # Some releases before 2.15 check twice that no value is negative.
        return [int(known is None or bool((known >= 0).all()))] * 2
    if name == "mode":
        given = named(operator.func, args, kwargs)
        return _modes(values, given["self"], given.get("dim", -1))
    if name in _EIGEN:
        known = values.known(args[0])
        is_finite = [int(known is None or bool(known.isfinite().all()))]
        # No allocation depends on whether all values are real. The solver's errors follow.
        are_real = [] if args[0].is_complex() else [int(not args[0].numel())]
        return [*(is_finite if name == "linalg_eig" else ()), *are_real, 0]
    if name in ("repeat_interleave", "bincount"):
        if kwargs.get("output_size") is not None or (name == "bincount" and not args[0].numel()):
            return []
        known = values.known(args[0])
        if known is None:
            return None
        if name == "bincount":
            return [int(known.min()), int(known.max())]
        # Up to 2.13 it then checks that no value is negative.
        return [int(known.sum()), int((known >= 0).all())]
    computed = values.computed(operator, args, kwargs)
    if computed is None:
        return None
    first = computed if isinstance(computed, torch.Tensor) else computed[0]
    return [first.shape[args[1] if name in _ALONG else 0]]


_MOST_FUSED = 2048
"""The longest row whose mode is found by one thread block."""


def _modes(values: Values, tensor: torch.Tensor, dim: int) -> Sequence[int] | None:
    """Return the results of Thrust's algorithms for each row along ``dim``.

    They are the number of distinct elements (``inner_product``, ``reduce_by_key``), the count of
    the mode and its index (``max_element``), the mode, 1 as it was found, its index among the
    sorted elements (``find``) and in the row; for booleans the number set and the last two.
    """
    if not tensor.dim() or tensor.shape[dim] <= _MOST_FUSED:
        return []
    known = values.known(tensor)
    if known is None:
        return None
    numbers: list[int] = []
    for row in known.transpose(dim, -1).reshape(-1, known.shape[dim]):
        ordered, places = row.sort(stable=True)
        found, counts = ordered.unique_consecutive(return_counts=True)
        most = int(counts.argmax())
        first = int(counts[:most].sum())
        if row.dtype == torch.bool:
            numbers += [int(row.count_nonzero()), 1, int(places[first])]
            continue
        mode = int.from_bytes(bytes(found[most : most + 1].view(torch.uint8).tolist()), "little")
        numbers += [len(found) - 1, len(found), int(counts[most]), most, mode]
        numbers += [1, first, int(places[first])]
    return numbers


def _counted(values: Values, masks: Sequence[Any]) -> Sequence[int] | None:
    """Return the number of elements that each of the ``masks`` sets."""
    counts = []
    for mask in masks:
        if not isinstance(mask, torch.Tensor) or mask.dtype not in _MASKS or not mask.is_cuda:
            continue
        known = values.known(mask)
        if known is None and not is_printing():
            return None
        counts.append(mask.numel() if known is None else int(known.count_nonzero()))
    return counts


Parts = tuple[torch.Tensor, "torch.Tensor | None"]
"""Indices, and values where they are known, on the CPU."""

SPARSE = frozenset({"aten::_coalesce", "aten::_to_sparse"})


MAKES_PARTS = ("aten::_nested_", "aten::_to_sparse_")
"""Prefixes of operators whose result is sparse or nested for any arguments."""


def has_parts(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a sparse or strided nested one, whose parts have values."""
    return tensor.layout is not torch.strided or tensor.is_nested


def strided_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the dense tensors that hold the memory of ``tensor``: itself if it is dense."""
    if tensor.layout is torch.strided:
        return (torch.ops.aten.values(tensor) if tensor.is_nested else tensor,)
    return parts_of_sparse(tensor)


def made_sparse(values: Values, name: str, args: Args) -> Parts | None:
    """Return the result of the operator ``name``; ``None`` if its size is unknown."""
    if name == "aten::_to_sparse":
        known = values.known(args[0])
        made = None if known is None else torch.ops.aten._to_sparse(known, *args[1:])
        if made is None or made.layout is not torch.sparse_coo:
            return None
        return made._indices(), made._values()
    indices, elements = map(values.known, parts_of_sparse(args[0]))
    if indices is None:
        return None
    shape = args[0].shape
    if elements is None:  # the size depends only on the indices
        shape = shape[: args[0].sparse_dim()]
    ones = torch.ones(indices.shape[1], device="cpu") if elements is None else elements
    made = torch.sparse_coo_tensor(
        indices, ones, shape, is_coalesced=False, check_invariants=False
    ).coalesce()
    return made.indices(), None if elements is None else made.values()


def read_by_sparse(values: Values, name: str, args: Args, parts: Parts) -> Sequence[int]:
    """Return the numbers that torch's own code reads while it makes ``parts``.

    With dense dimensions it first calls ``nonzero`` on all elements, then counts distinct indices.
    """
    count = int(parts[0].shape[1])
    is_hybrid = name == "aten::_to_sparse" and len(parts[0]) < args[0].dim()
    known = values.known(args[0]) if is_hybrid and count else None
    return [count] if known is None else [int(known.count_nonzero()), count]


def takes_parts(operator: Operator, args: Args) -> bool:
    """Return whether one of an operator's tensors, or its result, has parts on a GPU."""
    if operator.name == "aten::_embedding_bag_backward":
        return bool(named(operator.func, args, {})["sparse"])
    return operator.name.startswith(MAKES_PARTS) or any(
        isinstance(one, torch.Tensor) and one.is_cuda and has_parts(one) for one in args
    )


def from_parts(values: Values, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of the operator on the CPU; ``None`` if values are unknown."""
    known = [_on_cpu(values, one) for one in args]
    options = {name: _on_cpu(values, one) for name, one in kwargs.items()}
    if any(each.is_cuda for each in tensors_in((known, options))):
        return None
    return values.run(operator, known, options)


def _on_cpu(values: Values, given: Any) -> Any:
    """Return ``given`` with copies of its tensors on the CPU, as far as their values are known."""
    if isinstance(given, torch.device):
        return torch.device("cpu")
    if isinstance(given, (list, tuple)):
        return [_on_cpu(values, one) for one in given]
    if not isinstance(given, torch.Tensor) or not given.is_cuda:
        return given
    parts = [values.known(part) for part in strided_of(given)]
    found = [part.clone() for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return given
    if given.layout is torch.sparse_coo:
        like: dict[str, Any] = {"is_coalesced": given.is_coalesced(), "check_invariants": False}
        return torch.sparse_coo_tensor(found[0], found[1], given.shape, **like)
    if given.layout is not torch.strided:
        like = {"size": given.shape, "layout": given.layout, "check_invariants": False}
        return torch.sparse_compressed_tensor(found[0], found[1], found[2], **like)
    if given.is_nested:
        layout = given._nested_tensor_size(), given._nested_tensor_strides()
        offsets = given._nested_tensor_storage_offsets()
        return torch._nested_view_from_buffer(found[0], *layout, offsets)
    return found[0]
