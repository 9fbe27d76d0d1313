"""Operators whose kernels return the number of elements found to the host, and these numbers.

Source, torch 2.6 to 2.15: aten/src/ATen/native/cuda/Nonzero.cu (nonzero_cuda_out_impl),
Unique.cu (compute_unique, unique_dim_cuda_template), Repeat.cu and native/Repeat.cpp
(repeat_interleave_common), native/IndexingUtils.h (expandTensors), cuda/IndexKernel.cpp
(masked_select_out_cuda_impl), cuda/SummaryOps.cu (_bincount_cuda_template, _histc_cuda_template),
native/sparse/cuda/SparseCUDATensor.cu (coalesce_sparse_cuda), native/Distributions.cpp
(multinomial_out).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator

DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_MASKS = (torch.bool, torch.uint8)
_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
_ALONG = ("unique_dim", "unique_dim_consecutive")
_COUNTING = (
    *("nonzero", "_unique", "_unique2", "unique_consecutive", "repeat_interleave", "bincount"),
    *("masked_select", "multinomial"),
)
NAMES = frozenset(f"aten::{name}" for name in (*_COUNTING, *_ALONG, *_INDEXING))


def answers(values: Values, operator: Operator, args: Args, kwargs: Kwargs) -> Sequence[int] | None:
    """Return the numbers that torch's own code then reads, in order.

    ``None`` where deciding values are unknown. Where a kernel returns nothing, there are none.
    """
    name = operator.name.removeprefix("aten::")
    if name in _INDEXING:
        return _counted(values, args[1])
    if name == "masked_select":
        tensor, mask = args[:2]
        return _counted(values, [mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape))])
    if name == "multinomial":
        return [1, 0]  # the probabilities are valid, and not all of them zero
    if name in ("repeat_interleave", "bincount"):
        if kwargs.get("output_size") is not None or (name == "bincount" and not args[0].numel()):
            return []
        known = values.known(args[0])
        if known is None:
            return None
        if name == "bincount":
            return [int(known.min()), int(known.max())]
        # Up to 2.13 it then checks that none is negative.
        return [int(known.sum()), int((known >= 0).all())]
    computed = values.computed(operator, args, kwargs)
    if computed is None:
        return None
    first = computed if isinstance(computed, torch.Tensor) else computed[0]
    return [first.shape[args[1] if name in _ALONG else 0]]


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
