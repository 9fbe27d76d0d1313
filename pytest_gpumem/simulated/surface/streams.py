"""Streams in user code; their state is in the machine.

Source: torch/csrc/Stream.cpp, torch/cuda/streams.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from pytest_gpumem.allocator.trace import StreamKey
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.streams import HIGHEST_PRIORITY, priority_of
from pytest_gpumem.simulated.surface import events
from pytest_gpumem.simulated.surface.events import SimulatedEvent


class SimulatedStream:
    """``torch.cuda.Stream`` of a simulated GPU."""

    _machine: ClassVar[SimulatedMachine]
    _event_type: ClassVar[type[SimulatedEvent]]

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
        """Return the lowest and the highest priority."""
        return 0, HIGHEST_PRIORITY

    @property
    def _key(self) -> StreamKey:
        return self.device_index, self.stream_id

    @property
    def device(self) -> torch.device:
        """The device this stream belongs to."""
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        """The raw handle."""
        return self.stream_id

    @property
    def native_handle(self) -> int:
        """The raw handle."""
        return self.stream_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream_id)

    def query(self) -> bool:
        """Return whether all work is done, as the host then has seen."""
        clock = self._machine.streams.clock
        if not clock.is_over(clock.end(self._key)):
            return False
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return self._key in self._machine.streams.captures

    def synchronize(self) -> None:
        """Wait for all work."""
        streams = self._machine.streams
        streams.refuse_in_capture(self._key)
        streams.clock.wait_for(streams.clock.end(self._key))
        streams.timeline.finish_stream(self._key)

    def wait_stream(self, stream: Any) -> None:
        """Delay later work until the present work of ``stream`` is done."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        """Delay later work until an event is complete."""
        event.wait(self)

    def record_event(self, event: Any = None) -> SimulatedEvent:
        """Record an event, by default a new one."""
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
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


_TorchStream = torch.Stream


class _Api:
    """The functions of ``torch._C`` about streams."""

    def __init__(self, machine: SimulatedMachine, stream: type[SimulatedStream]) -> None:
        self._machine = machine
        self._stream = stream

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:
        return self._machine.streams.current(index), index, 1

    def _cuda_getDefaultStream(self, index: int) -> tuple[int, int, int]:
        return 0, index, 1

    def _cuda_getCurrentRawStream(self, index: int) -> int:
        return self._machine.streams.current(index)

    def _cuda_getStreamFromExternal(self, handle: int, index: int) -> tuple[int, int, int]:
        return handle, index, 1

    def _cuda_setStream(
        self, stream_id: int = 0, device_index: int = 0, device_type: int = 1
    ) -> None:
        self._machine.current_index = self._machine.device(device_index).index
        self._machine.streams.choose(device_index, stream_id)

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return self._machine.streams.is_capturing(self._machine.current_index)

    def _cuda_synchronize(self) -> None:
        self._machine.streams.synchronize(self._machine.current_index)

    def _cuda_sleep(self, cycles: int) -> None:
        self._machine.streams.sleep(self._machine.current_index, cycles)

    def _cuda_get_sync_debug_mode(self) -> int:
        return self._machine.streams.sync_debug_mode

    def _cuda_set_sync_debug_mode(self, mode: int) -> None:
        self._machine.streams.sync_debug_mode = mode

    def _accelerator_getStream(self, index: int) -> SimulatedStream:
        stream = self._machine.streams.current(index)
        return self._stream(stream_id=stream, device_index=index)

    def _accelerator_setStream(self, stream: SimulatedStream) -> None:
        self._cuda_setStream(stream.stream_id, stream.device_index)

    def _accelerator_synchronizeDevice(self, index: int) -> None:
        self._machine.streams.synchronize(self._machine.device(index).index)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """``Tensor.record_stream``: its memory is not used again before ``stream`` is done."""
        record = self._machine.storages.of(tensor)
        if record is None:
            raise RuntimeError("record_stream is not implemented for tensors on the CPU")
        if record.address:
            record.allocator.record_stream(record.address, stream.stream_id, stream.device_index)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the stream and event classes wherever torch names them, and their C++ bases."""
    bound = {
        "_machine": machine,
        "_event_type": events.planned(machine, patches),
        "__module__": "torch",
    }
    generic = type("Stream", (_AnyStream, SimulatedStream), bound)
    bound = {**bound, "__module__": "torch.cuda"}
    stream = type("Stream", (_CudaStream, generic), bound)
    for module in (torch.cuda, torch.cuda.streams):
        patches.add(module, "Stream", stream)
        patches.add(module, "ExternalStream", type("ExternalStream", (_External, stream), {}))
    patches.add(torch, "Stream", generic)
    api = _Api(machine, stream)
    add_functions(api, patches)
    patches.add(torch.Tensor, "register_hook", _register_hook(machine, torch.Tensor.register_hook))
    patches.add(
        torch.Tensor, "record_stream", lambda tensor, stream: api.record_stream(tensor, stream)
    )


def _register_hook(machine: SimulatedMachine, register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def register_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        streams = machine.streams
        if streams.used and tensor.requires_grad and tensor.is_leaf and callable(hook):
            return register(tensor, streams.hooked(tensor, hook))
        return register(tensor, hook)

    return register_hook


class _AnyStream(SimulatedStream):
    """``torch.Stream``, of which ``torch.cuda.Stream`` is one; other devices have their own."""

    def __new__(cls, device: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(device, (str, torch.device)) and torch.device(device).type != "cuda":
            return _TorchStream(device, *args, **options)
        return super().__new__(cls)

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

    __repr__ = SimulatedStream.__repr__


class _External(SimulatedStream):
    """``torch.cuda.ExternalStream``: a stream that another library made, by its address."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device, stream_ptr=stream_ptr)
