"""Events: points in the work of streams that others wait for."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from pytest_gpumem.allocator.trace import Marks, StreamKey
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.captures import Capture
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.streams import cuda_error

_TorchEvent = torch.Event


class SimulatedEvent:
    """An event of a simulated GPU: complete as soon as the work before it is; times are the host's.

    ``torch.Event`` for a CUDA device and ``torch.cuda.Event`` are kinds of it.
    """

    _machine: ClassVar[SimulatedMachine]

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._times = enable_timing
        self._device: int | None = None
        self._is_recorded = False
        self.moment = 0.0
        """The time when the work before it is done, on the clock of the streams."""
        self.marks: Marks = {}
        self.capture: Capture | None = None

    @property
    def device(self) -> torch.device | None:
        """The device it was recorded on."""
        return None if self._device is None else torch.device("cuda", self._device)

    @property
    def cuda_event(self) -> int:
        """The raw handle; 0 before the event is recorded."""
        return id(self) if self._is_recorded else 0

    event_id = cuda_event

    def record(self, stream: Any = None) -> None:
        """Record the event."""
        streams = self._machine.streams
        key = self._key(stream)
        if self._device not in (None, key[0]):
            raise RuntimeError(
                f"Event device {self._device} does not match recording stream's device {key[0]}."
            )
        self._device = key[0]
        self._is_recorded = True
        self.marks = streams.timeline.mark(key)
        self.capture = streams.captures.get(key)
        self.moment = streams.clock.end(key)

    def query(self) -> bool:
        """Return whether the event is complete, as the host then has seen."""
        if not self._machine.streams.clock.is_over(self.moment):
            return False
        self.synchronize()
        return True

    def wait(self, stream: Any = None) -> None:
        """Delay later work of a stream until the event is complete."""
        if self._is_recorded:
            self._machine.streams.waits(self._key(stream), self)

    def synchronize(self) -> None:
        """Wait for the event."""
        streams = self._machine.streams
        if self.capture is not None and self.capture.under_way:
            self.capture.valid = False
            raise cuda_error("operation not permitted when stream is capturing")
        streams.clock.wait_for(self.moment)
        streams.timeline.finish(self.marks)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        """Return the milliseconds between two events, on the host's clock."""
        if not (self._times and end_event._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end_event._is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not self._machine.streams.clock.is_over(max(self.moment, end_event.moment)):
            raise cuda_error("device not ready")
        return (end_event.moment - self.moment) * 1000

    def _key(self, stream: Any) -> StreamKey:
        if stream is not None:
            return stream.device_index, stream.stream_id
        index = self._machine.current_index
        return index, self._machine.streams.current(index)


class _AnyEvent(SimulatedEvent):
    """``torch.Event``, whose first argument is the device; other devices have their own."""

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type != "cuda":
            return _TorchEvent(device, **options)
        return super().__new__(cls)

    def __init__(self, device: Any = None, **options: Any) -> None:
        super().__init__(**options)

    def __repr__(self) -> str:
        # torch/csrc/Event.cpp (THPEvent_repr)
        index = self._machine.current_index if self._device is None else self._device
        timing = int(self._times)
        return (
            f"torch.Event device_type=cuda, device_index={index}, event_flag={timing}, "
            f"event_id={self.event_id}"
        )


class _CudaEvent(SimulatedEvent):
    """``torch.cuda.Event``, whose first argument is whether it measures time."""

    __init__ = SimulatedEvent.__init__

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> NoReturn:
        """Refuse an event of another process: they cannot see a simulated GPU."""
        raise cuda_error("operation not supported")

    def ipc_handle(self) -> bytes:
        """Return a handle for other processes: they cannot see a simulated GPU."""
        raise cuda_error("operation not supported")

    def __repr__(self) -> str:
        if not self._is_recorded:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


def planned(machine: SimulatedMachine, patches: Patches) -> type[SimulatedEvent]:
    """Replace the event classes wherever torch names them; return ``torch.cuda.Event``."""
    bound = {"_machine": machine, "__module__": "torch"}
    generic = type("Event", (_AnyEvent,), bound)
    bound = {"__module__": "torch.cuda"}
    event = type("Event", (_CudaEvent, generic), bound)
    for module in (torch.cuda, torch.cuda.streams):
        patches.add(module, "Event", event)
    patches.add(torch, "Event", generic)
    return event
