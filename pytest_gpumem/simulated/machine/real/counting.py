"""Counting that the CPU has no kernel for.

Source: aten/src/ATen/native/cuda/SummaryOps.cu (_histc_cuda_template, getBin) of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count integers as CUDA does: it finds bins by integer division, and counts in their type."""
    if self.dtype.is_floating_point:
        counted: Tensor = _aten.histc(self, bins, min, max)
        return counted
    low, high = int(min), int(max)
    if low == high and self.numel():
        low, high = int(self.min()), int(self.max())
    if low == high:
        low, high = low - 1, high + 1
    values = self.flatten().long()
    inside = values[(values >= low) & (values <= high)]
    found = ((inside - low) * bins).div(high - low, rounding_mode="trunc").clamp_(max=bins - 1)
    return found.bincount(minlength=bins).to(self.dtype)


KERNELS: dict[str, Callable[..., Any]] = {"aten::histc": _histc}
"""By operator name."""
