"""Random numbers that nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST = 1 << 16
"""Numbers of a tensor that is worth it; what code may decide by is smaller."""

_IN_PLACE = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)
_FACTORIES = (torch.ops.aten.rand.default, torch.ops.aten.randn.default)


def unfilled() -> AbstractContextManager[object]:
    """Return a context that leaves large random tensors on the CPU as the system gave them.

    For runs whose memory alone matters: half of the time of a step that makes its model on the CPU
    goes into random weights, and samples for the largest batch of a large GPU, once written, need
    more memory than a laptop has.
    """
    return _Unfilled()  # type: ignore[no-untyped-call]  # unannotated in torch


class _Unfilled(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func in _IN_PLACE and args[0].device.type == "cpu" and args[0].numel() >= SMALLEST:
            return args[0]
        if func in _FACTORIES and _on_host(kwargs) and prod(args[0]) >= SMALLEST:
            return torch.empty(args[0], **kwargs)
        return func(*args, **kwargs)


def _on_host(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or device.type == "cpu"
