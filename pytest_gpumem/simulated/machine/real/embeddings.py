"""Bags of embeddings, with the results of CUDA's kernel that the CPU's leaves out.

Source: aten/src/ATen/native/cuda/EmbeddingBag.cu (EmbeddingBag_updateOutputKernel_sum_mean and
_max: which bag each index is in, and how many indices of a bag are no padding), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_MAX = 2


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    output, _, _, highest = _aten._embedding_bag(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, padding_idx,
    )  # fmt: skip
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.numel(), dtype=offsets.dtype, device="cpu")
    bags = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    counted = bags[indices != padding_idx]
    sizes = counted.bincount(minlength=offsets.numel())
    chosen = highest if mode == _MAX else 0  # memory that is not written is not read either
    return output, bags.to(indices.dtype), sizes.to(indices.dtype), chosen


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
}
"""By operator name."""
