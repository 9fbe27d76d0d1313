"""Captures of CUDA graphs that are under way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.simulated.gpu.device import Device
from pytest_gpumem.simulated.machine.pool_contents import Recording


class Capture:
    """A capture under way, on the stream it began on and those that wait for it."""

    def __init__(
        self,
        gpu: Device,
        pool: PoolId,
        recording: Recording,
        draws: Callable[[Device, torch.Generator | None], None],
    ) -> None:
        self.gpu = gpu
        self.pool = pool
        self.stream = gpu.stream
        self.memory = gpu.allocator
        self.recording = recording
        self.draws: Callable[[Device, torch.Generator | None], None] | None = draws
        """Called for each random operator until the capture ends: it refers to the graph."""
        self.under_way = True
        self.is_empty = True
        """Whether nothing was captured yet that a graph has a node for."""
        self.valid = True
        """Whether every operation so far is allowed in a capture."""

    def end(self) -> None:
        """End the capture, whose memory stays in its pool."""
        self.under_way, self.draws = False, None
        self.memory.mark_capture_end()
        self.memory.end_allocate_to_pool(self.pool)
