"""Operators whose kernels return the number of elements found to the host, and these numbers.

Each function returns the numbers that torch's own code then reads, in order; ``None`` where
deciding values are unknown. Where a kernel returns nothing, the sequence is empty.

Source, torch 2.6 to 2.15: aten/src/ATen/native/cuda/Nonzero.cu (nonzero_cuda_out_impl),
Unique.cu (compute_unique, unique_dim_cuda_template), Repeat.cu and native/Repeat.cpp
(repeat_interleave_common), native/IndexingUtils.h (expandTensors), cuda/IndexKernel.cpp
(masked_select_out_cuda_impl), cuda/SummaryOps.cu (_bincount_cuda_template, _histc_cuda_template),
native/sparse/cuda/SparseCUDATensor.cu (coalesce_sparse_cuda), native/Distributions.cpp
(multinomial_out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator

Answers = Callable[[Values, Operator, tuple[Any, ...], dict[str, Any]], "Sequence[int] | None"]

DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_MASKS = (torch.bool, torch.uint8)


def _length(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    """Return the length of the first result."""
    computed = values.computed(operator, args, kwargs)
    if computed is None:
        return None
    first = computed if isinstance(computed, torch.Tensor) else computed[0]
    return [first.shape[0]]


def _length_along(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    """Return the length of ``unique_dim``'s result in the dimension that it compares."""
    computed = values.computed(operator, args, kwargs)
    return None if computed is None else [computed[0].shape[args[1]]]


def _repeated(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    if kwargs.get("output_size") is not None:
        return []
    known = values.known(args[0])
    # Up to 2.13 it then checks that none is negative.
    return None if known is None else [int(known.sum()), int((known >= 0).all())]


def _counted(values: Values, masks: Sequence[Any]) -> Sequence[int] | None:
    """Return the number of elements that each of the ``masks`` sets."""
    counts = []
    for mask in masks:
        if not isinstance(mask, torch.Tensor) or mask.dtype not in _MASKS or not mask.is_cuda:
            continue
        known = values.known(mask)
        if known is None:
            return None
        counts.append(int(known.count_nonzero()))
    return counts


def _indexed(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    return _counted(values, args[1])


def _selected(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    tensor, mask = args[:2]
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    return _counted(values, [mask.expand(shape)])


def _binned(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    if not args[0].numel():
        return []
    known = values.known(args[0])
    return None if known is None else [int(known.min()), int(known.max())]


def _valid(
    values: Values, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    """Return the checks of valid probabilities, not all of them zero."""
    return [1, 0]


_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")

BY_NAME: dict[str, Answers] = {
    "aten::nonzero": _length,
    "aten::_unique": _length,
    "aten::_unique2": _length,
    "aten::unique_consecutive": _length,
    "aten::unique_dim": _length_along,
    "aten::unique_dim_consecutive": _length_along,
    "aten::repeat_interleave": _repeated,
    "aten::masked_select": _selected,
    "aten::bincount": _binned,
    "aten::multinomial": _valid,
    **{f"aten::{name}": _indexed for name in _INDEXING},
}


def of_groups(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the length of the dimension that the groups of a grouped product divide.

    Rows of ``first`` where each group has a matrix of ``second``, columns of ``second`` where each
    has one of ``first``, and the dimension that is summed over where both are matrices
    (``_grouped_mm`` in torch/nn/functional.py).
    """
    if first.dim() == 3:
        return int(second.shape[-1])
    return int(first.shape[-1] if second.dim() == 2 else first.shape[0])
