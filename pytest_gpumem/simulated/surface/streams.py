"""Streams and events in user code; their state is in the machine.

Source: torch/csrc/Stream.cpp and Event.cpp, torch/cuda/streams.py.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch

from pytest_gpumem.allocator.trace import Marks, StreamKey
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.streams import (
    HIGHEST_PRIORITY,
    Capture,
    cuda_error,
    priority_of,
)

_TorchEvent = torch.Event
_TorchStream = torch.Stream


class SimulatedEvent:
    """``torch.Event`` of a simulated GPU; other devices have their own.

    It is complete as soon as the work before it is; times are read from the host's clock.
    """

    _machine: ClassVar[SimulatedMachine]

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type != "cuda":
            return _TorchEvent(device, **options)
        return super().__new__(cls)

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._times = enable_timing
        self._device: int | None = None
        self._is_recorded = False
        self.moment = 0.0
        """The host's time when it was recorded."""
        self.marks: Marks = {}
        self.capture: Capture | None = None

    @property
    def device(self) -> torch.device | None:
        return None if self._device is None else torch.device("cuda", self._device)

    @property
    def cuda_event(self) -> int:
        """The raw handle; 0 before the event is recorded."""
        return id(self) if self._is_recorded else 0

    event_id = cuda_event

    def record(self, stream: Any = None) -> None:
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
        self.moment = time.perf_counter()

    def query(self) -> bool:
        """Return that the event is complete, which the host has seen from then on."""
        self.synchronize()
        return True

    def wait(self, stream: Any = None) -> None:
        if self._is_recorded:
            self._machine.streams.waits(self._key(stream), self.marks, self.capture)

    def synchronize(self) -> None:
        streams = self._machine.streams
        if self.capture is not None and self.capture.under_way:
            self.capture.valid = False
            raise cuda_error("operation not permitted when stream is capturing")
        streams.timeline.finish(self.marks)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        """Return the milliseconds between two events, on the host's clock."""
        if not (self._times and end_event._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end_event._is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self._device != end_event._device:
            raise cuda_error("invalid resource handle")
        return (end_event.moment - self.moment) * 1000

    def _key(self, stream: Any) -> StreamKey:
        if stream is not None:
            return stream.device_index, stream.stream_id
        index = self._machine.current_index
        return index, self._machine.streams.current(index)

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

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        super().__init__(enable_timing=enable_timing)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> NoReturn:
        """Refuse an event of another process: processes cannot share a simulated GPU."""
        raise cuda_error("operation not supported")

    def ipc_handle(self) -> bytes:
        raise cuda_error("operation not supported")

    def __repr__(self) -> str:
        if not self._is_recorded:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class SimulatedStream:
    """``torch.Stream`` of a simulated GPU; other devices have their own."""

    _machine: ClassVar[SimulatedMachine]
    _event_type: ClassVar[type[SimulatedEvent]]

    def __new__(cls, device: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(device, (str, torch.device)) and torch.device(device).type != "cuda":
            return _TorchStream(device, *args, **options)
        return super().__new__(cls)

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = 1,
        stream_ptr: int | None = None,
        **_: Any,
    ) -> None:
        if device is not None:
            device_index = device if isinstance(device, int) else torch.device(device).index
        self.device_index = self._machine.device(device_index).index
        self.device_type = device_type
        if stream_id is None:
            stream_id = stream_ptr
        if stream_id is None:
            stream_id = self._machine.streams.make(self.device_index, priority)
        self.stream_id = stream_id
        if stream_id != 0:
            self._machine.streams.used = True
        self.priority = priority_of(stream_id)
        self._before: list[tuple[int, int]] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, HIGHEST_PRIORITY

    @property
    def _key(self) -> StreamKey:
        return self.device_index, self.stream_id

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    native_handle = cuda_stream

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream_id)

    def query(self) -> bool:
        """Return that all work is done, which the host has seen from then on."""
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return self._key in self._machine.streams.captures

    def synchronize(self) -> None:
        streams = self._machine.streams
        streams.refuse_in_capture(self._key)
        streams.timeline.finish_stream(self._key)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> SimulatedEvent:
        event = self._event_type() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]  # the caller's own event

    def __enter__(self) -> SimulatedStream:
        machine = self._machine
        self._before.append((machine.current_index, machine.streams.current(self.device_index)))
        machine.current_index = self.device_index
        machine.streams.choose(*self._key)
        return self

    def __exit__(self, *_: object) -> None:
        machine = self._machine
        index, stream = self._before.pop()
        machine.streams.choose(self.device_index, stream)
        machine.current_index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        # torch/csrc/Stream.cpp (THPStream_repr)
        return (
            f"torch.Stream device_type=cuda, device_index={self.device_index}, "
            f"stream_id={self.stream_id}"
        )


class _CudaStream(SimulatedStream):
    """``torch.cuda.Stream``."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class _External(SimulatedStream):
    """``torch.cuda.ExternalStream``: a stream that another library made, by its address."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device, stream_ptr=stream_ptr)


def _add_functions(
    machine: SimulatedMachine, patches: Patches, stream_type: type[SimulatedStream]
) -> None:
    streams = machine.streams

    def set_stream(stream_id: int = 0, device_index: int = 0, device_type: int = 1) -> None:
        machine.current_index = machine.device(device_index).index
        streams.choose(device_index, stream_id)

    def set_debug_mode(mode: int) -> None:
        streams.sync_debug_mode = mode

    functions: dict[str, Callable[..., Any]] = {
        "_cuda_getCurrentStream": lambda index: (streams.current(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": streams.current,
        "_cuda_getStreamFromExternal": lambda handle, index: (handle, index, 1),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: streams.is_capturing(machine.current_index),
        "_cuda_synchronize": lambda: streams.synchronize(machine.current_index),
        "_cuda_sleep": lambda cycles: None,
        "_cuda_get_sync_debug_mode": lambda: streams.sync_debug_mode,
        "_cuda_set_sync_debug_mode": set_debug_mode,
        "_accelerator_getStream": lambda index: stream_type(
            stream_id=streams.current(index), device_index=index
        ),
        "_accelerator_setStream": lambda stream: set_stream(stream.stream_id, stream.device_index),
        "_accelerator_synchronizeDevice": lambda index: streams.synchronize(
            machine.device(index).index
        ),
    }
    add_functions(functions, patches)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the stream and event classes wherever torch names them, and their C++ bases."""
    register: Callable[..., Any] = torch.Tensor.register_hook

    @functools.wraps(register)
    def register_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        streams = machine.streams
        if streams.used and tensor.requires_grad and tensor.is_leaf and callable(hook):
            hook = streams.hooked(tensor, hook)
        return register(tensor, hook)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        record = machine.storages.of(tensor)
        if record is None:
            raise RuntimeError("record_stream is not implemented for tensors on the CPU")
        if record.address:
            record.allocator.record_stream(record.address, stream.stream_id, stream.device_index)

    generic_event = type("Event", (SimulatedEvent,), {"_machine": machine, "__module__": "torch"})
    event = type("Event", (_CudaEvent, generic_event), {"__module__": "torch.cuda"})
    bound = {"_machine": machine, "_event_type": event, "__module__": "torch"}
    generic = type("Stream", (SimulatedStream,), bound)
    stream = type("Stream", (_CudaStream, generic), {**bound, "__module__": "torch.cuda"})
    for module in (torch.cuda, torch.cuda.streams):
        patches.add(module, "Event", event)
        patches.add(module, "Stream", stream)
        patches.add(module, "ExternalStream", type("ExternalStream", (_External, stream), {}))
    patches.add(torch, "Event", generic_event)
    patches.add(torch, "Stream", generic)
    _add_functions(machine, patches, stream)
    patches.add(torch.Tensor, "register_hook", register_hook)
    patches.add(torch.Tensor, "record_stream", record_stream)
