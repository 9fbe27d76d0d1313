"""Sparse tensors, the number of whose elements depends on values, and dense ones beside them.

Source, torch 2.6 to 2.15: aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu
(_coalesce_sparse_cuda reads how many indices differ), native/TensorConversions.cpp (dense_to_sparse
takes ``nonzero``).
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator

Parts = tuple[torch.Tensor, "torch.Tensor | None"]
"""Indices, and values where they are known, on the CPU."""

NAMES = frozenset({"aten::_coalesce", "aten::_to_sparse"})


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor."""
    return torch.ops.aten._indices(tensor), torch.ops.aten._values(tensor)


def strided_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with memory that ``tensor`` has: itself if dense, none if compressed."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return parts_of(tensor) if tensor.layout is torch.sparse_coo else ()


def counted(values: Values, name: str, args: Args) -> Parts | None:
    """Return the result of the operator ``name``; ``None`` where deciding values are unknown."""
    if name == "aten::_to_sparse":
        known = values.known(args[0])
        made = None if known is None else torch.ops.aten._to_sparse(known, *args[1:])
        return None if made is None or made.layout is not torch.sparse_coo else parts_of(made)
    indices, elements = map(values.known, parts_of(args[0]))
    if indices is None:
        return None
    ones = torch.ones(indices.shape[1], device="cpu") if elements is None else elements
    made = torch.sparse_coo_tensor(
        indices, ones, args[0].shape, is_coalesced=False, check_invariants=False
    ).coalesce()
    return made.indices(), None if elements is None else made.values()


def is_among(args: tuple[Any, ...]) -> bool:
    """Return whether one of an operator's tensors is a sparse one of a GPU."""
    return any(
        isinstance(one, torch.Tensor) and one.layout is torch.sparse_coo and one.is_cuda
        for one in args
    )


def computed(values: Values, operator: Operator, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """Return what the CPU makes of sparse tensors and dense ones, ``None`` if it is unknown."""
    known: list[Any] = []
    for one in args:
        if not isinstance(one, torch.Tensor) or not one.is_cuda:
            known.append(one)
            continue
        parts = [values.known(part) for part in strided_of(one)]
        found = [part.clone() for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        if one.layout is torch.sparse_coo:
            like: dict[str, Any] = {"is_coalesced": one.is_coalesced(), "check_invariants": False}
            found = [torch.sparse_coo_tensor(found[0], found[1], one.shape, **like)]
        known.append(found[0])
    if kwargs.get("device") is not None or any(
        each.is_cuda for each in tensors_in((known, kwargs))
    ):
        return None
    made = values.run(operator, known, kwargs)
    return made if isinstance(made, torch.Tensor) else None
