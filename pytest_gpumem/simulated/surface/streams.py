"""Streams and events: one queue, in which everything is done at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


class SimulatedStream:
    """``torch.cuda.Stream`` of a simulated GPU: work on it is finished when it is issued."""

    _made = 0

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = 1,
        **_: Any,
    ) -> None:
        if stream_id is None:
            SimulatedStream._made += 1
            stream_id = SimulatedStream._made
        self.stream_id = stream_id
        self.device_index = device_index
        self.device_type = device_type
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The device this stream belongs to."""
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        """The raw handle."""
        return self.stream_id

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def synchronize(self) -> None:
        """Wait for all work."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for another stream's work."""

    def wait_event(self, event: Any) -> None:
        """Wait for an event."""

    def record_event(self, event: Any = None) -> SimulatedEvent:
        """Record an event, by default a new one."""
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]  # the caller's own event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class SimulatedEvent:
    """``torch.cuda.Event``: complete as soon as it is recorded; times are the host's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the event."""
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        """Whether the event is complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait."""

    def synchronize(self) -> None:
        """Wait for the event."""

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        """Milliseconds between two events, on the host's clock."""
        return (end_event._recorded - self._recorded) * 1000


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace the stream and event classes wherever torch names them."""
    for module in (torch.cuda, torch.cuda.streams):
        patches.plan(module, "Stream", SimulatedStream)
        patches.plan(module, "ExternalStream", SimulatedStream)
        patches.plan(module, "Event", SimulatedEvent)
    patches.plan(torch, "Stream", SimulatedStream)
    patches.plan(torch, "Event", SimulatedEvent)
