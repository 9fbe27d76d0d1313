"""Streams: which one memory belongs to, and what waits for what.

Work is done when it is issued, as far as anybody can see: queries say yes, but for the time that
``torch.cuda._sleep`` takes. What the *host* knows to be finished decides when memory that another
stream used may be used again; the
:class:`~pytest_gpumem.simulated.allocator.timeline.Timeline` keeps that.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_gpumem.simulated.allocator.timeline import StreamKey, Timeline
from pytest_gpumem.simulated.surface.clock import Clock
from pytest_gpumem.simulated.surface.leaves import NO_SEQUENCE, Leaves

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation
    from pytest_gpumem.simulated.surface.events import SimulatedEvent
    from pytest_gpumem.simulated.surface.graphs import Capture

STREAMS_PER_POOL = 32
"""kStreamsPerPool of c10/cuda/CUDAStream.cpp: then the first stream is handed out again."""
HIGHEST_PRIORITY = -3
"""torch compiles four priorities, 0 to -3; GPUs since Volta have six."""
_TYPE_BITS = 4
_WARN, _ERROR = 1, 2
_SYNCHRONIZES = "called a synchronizing CUDA operation"
"""warn_or_error_on_sync of c10/cuda/CUDAFunctions.cpp."""


class _ThreadStreams(threading.local):
    """The current stream of each device, which every thread has for itself."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}
        self.in_node: dict[int, tuple[int, int, int]] = {}
        """By device: graph task, node and stream, where a backward hook chose another stream."""
        self.of_last_node: dict[int, int] = {}
        self.leaves = Leaves()
        self.chosen: dict[int, tuple[list[int], list[int]]] = {}
        """By device: from which autograd sequence number, which each thread counts for itself,
        on which stream was the current one."""


class Streams:
    """The streams of a machine: current ones, captures, and the order between them."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.clock = Clock()
        self.used = False
        """Whether there ever was any stream but the default one."""
        self.sync_debug_mode = 0
        """What ``torch.cuda.set_sync_debug_mode`` was told."""
        self.captures: dict[StreamKey, Capture] = {}
        """The capture under way on each stream."""
        self._here = _ThreadStreams()
        self._made: dict[tuple[int, int], int] = {}

    def current(self, device: int) -> int:
        """Handle of the stream that work on ``device`` goes to now; 0 is the default stream.

        Autograd runs a node on the stream on which its forward ran.
        """
        if not self.used:
            return 0
        task = torch._C._current_graph_task_id()
        if task != -1:
            return self._of_node(device, task)
        return self._here.current.get(device, 0)

    def choose(self, device: int, stream: int) -> None:
        """Make ``stream`` the current one of ``device``, for this thread."""
        if not self.used and stream == 0:
            return
        self.used = True
        self.timeline.note((device, stream))
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._here.in_node[device] = (task, _node_sequence(), stream)
            return
        self._here.current[device] = stream
        numbers, streams = self._here.chosen.setdefault(device, ([], []))
        numbers.append(torch._C._autograd._get_sequence_nr())
        streams.append(stream)

    def abandon_captures(self) -> None:
        """End the captures that a test left open."""
        for capture in set(self.captures.values()):
            capture.abandon()
            capture.gpu.simulation.execution.watch(None)
        self.captures.clear()

    def reset(self, *, keep: bool) -> None:
        """Forget what a test has set and, unless ``keep``, that streams were ever used."""
        self.sync_debug_mode = 0
        self.clock = Clock()
        if not keep:
            self.used = False
            self._here = _ThreadStreams()
            self._made.clear()

    def make(self, device: int, priority: int) -> int:
        """Handle of a stream out of the pool of its device and priority, in turn."""
        level = min(max(-priority, 0), -HIGHEST_PRIORITY)
        made = self._made.get((device, level), 0)
        self._made[device, level] = made + 1
        # makeStreamId: the index, the kind (1 and up: pools), and a bit for torch's own streams.
        return (made % STREAMS_PER_POOL) << (_TYPE_BITS + 1) | (level + 1) << 1 | 1

    def is_capturing(self, device: int) -> bool:
        """Whether the current stream of ``device`` is being captured."""
        return bool(self.captures) and (device, self.current(device)) in self.captures

    def host_waits(self, device: int) -> None:
        """The host waits for the current stream: it reads or writes memory of ``device``."""
        if self.sync_debug_mode == _WARN:
            warnings.warn(_SYNCHRONIZES, stacklevel=3)
        elif self.sync_debug_mode == _ERROR:
            raise RuntimeError(_SYNCHRONIZES)
        if self.used or self.clock.is_running:
            key = (device, self.current(device))
            self.refuse_in_capture(key)
            self.clock.wait_for(self.clock.end(key))
            self.timeline.finish_stream(key)

    def sleep(self, device: int, cycles: int) -> None:
        """The current stream does nothing else for so long (``torch.cuda._sleep``)."""
        key = (device, self.current(device))
        if key not in self.captures:
            self.clock.sleep(key, cycles)

    def synchronize(self, device: int) -> None:
        """The host waits for every stream of ``device``."""
        for key in self.captures:
            self.refuse_in_capture(key)
        self.clock.wait_for_device(device)
        if self.used:
            self.timeline.finish_device(device)

    def refuse_in_capture(self, key: StreamKey) -> None:
        """Raise what CUDA raises for a wait during a capture, which then is worth nothing."""
        capture = self.captures.get(key)
        if capture is not None:
            capture.valid = False
            raise cuda_error("operation not permitted when stream is capturing")

    def waits(self, key: StreamKey, event: SimulatedEvent) -> None:
        """Later work of a stream comes after an event; with it the stream joins a capture."""
        self.timeline.wait(key, event.marks)
        self.clock.delay(key, event.moment)
        capture = event.capture
        if capture is not None and capture.under_way:
            self.captures.setdefault(key, capture)

    def _of_node(self, device: int, task: int) -> int:
        here = self._here
        number = _node_sequence()
        chosen = here.in_node.get(device)
        if chosen is not None and chosen[:2] == (task, number):
            return chosen[2]
        if number == NO_SEQUENCE:
            # A leaf's node has the stream on which the leaf was first used.
            user = here.leaves.first_use(task)
            return here.of_last_node.get(device, 0) if user is None else self._at(device, user)
        stream = self._at(device, number)
        here.of_last_node[device] = stream
        return stream

    def _at(self, device: int, number: int) -> int:
        """The current stream of ``device`` when autograd's node ``number`` was made."""
        numbers, streams = self._here.chosen.get(device, ((), ()))
        position = bisect_right(numbers, number)
        return streams[position - 1] if position else 0

    def hooked(self, leaf: torch.Tensor, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``hook`` of a leaf, which autograd runs before it says which node is next."""
        reference = weakref.ref(leaf)

        @functools.wraps(hook)
        def call(gradient: Any) -> Any:
            with self._here.leaves.hooks_of(reference()):
                return hook(gradient)

        return call


def _node_sequence() -> int:
    node = torch._C._current_autograd_node()
    return NO_SEQUENCE if node is None else int(node._sequence_nr())


def cuda_error(text: str) -> RuntimeError:
    """An error of the CUDA runtime as torch raises it; a class of its own since 2.8."""
    error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    return error(f"CUDA error: {text}")


class SimulatedStream:
    """``torch.cuda.Stream`` of a simulated GPU."""

    _simulation: ClassVar[Simulation]

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
        self.device_index = self._simulation.device(device_index).index
        self.device_type = device_type
        if stream_id is None:
            stream_id = stream_ptr
        if stream_id is None:
            stream_id = self._simulation.streams.make(self.device_index, priority)
        self.stream_id = stream_id
        if stream_id != 0:
            self._simulation.streams.used = True
        self.priority = _priority(stream_id)
        self._before: list[tuple[int, int]] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
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
        """Whether all work is done; the host then knows."""
        clock = self._simulation.streams.clock
        if not clock.is_over(clock.end(self._key)):
            return False
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._key in self._simulation.streams.captures

    def synchronize(self) -> None:
        """Wait for all work."""
        streams = self._simulation.streams
        streams.refuse_in_capture(self._key)
        streams.clock.wait_for(streams.clock.end(self._key))
        streams.timeline.finish_stream(self._key)

    def wait_stream(self, stream: Any) -> None:
        """Let later work come after what ``stream`` has so far."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        """Let later work come after an event."""
        event.wait(self)

    def record_event(self, event: Any = None) -> SimulatedEvent:
        """Record an event, by default a new one."""
        event = self._simulation.event_type() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]  # the caller's own event

    def __enter__(self) -> SimulatedStream:
        simulation = self._simulation
        self._before.append(
            (simulation.current_index, simulation.streams.current(self.device_index))
        )
        simulation.current_index = self.device_index
        simulation.streams.choose(*self._key)
        return self

    def __exit__(self, *_: object) -> None:
        simulation = self._simulation
        index, stream = self._before.pop()
        simulation.streams.choose(self.device_index, stream)
        simulation.current_index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


_TorchStream = torch.Stream


def _priority(stream: int) -> int:
    """The priority that a handle of :meth:`Streams.make` has; 0 for handles from elsewhere."""
    kind = stream >> 1 & (1 << _TYPE_BITS) - 1
    return 1 - kind if stream & 1 and 1 <= kind <= 1 - HIGHEST_PRIORITY else 0


class _Api:
    """The functions of ``torch._C`` about streams."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:
        return self._simulation.streams.current(index), index, 1

    def _cuda_getDefaultStream(self, index: int) -> tuple[int, int, int]:
        return 0, index, 1

    def _cuda_getCurrentRawStream(self, index: int) -> int:
        return self._simulation.streams.current(index)

    def _cuda_getStreamFromExternal(self, handle: int, index: int) -> tuple[int, int, int]:
        return handle, index, 1

    def _cuda_setStream(
        self, stream_id: int = 0, device_index: int = 0, device_type: int = 1
    ) -> None:
        self._simulation.current_index = self._simulation.device(device_index).index
        self._simulation.streams.choose(device_index, stream_id)

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return self._simulation.streams.is_capturing(self._simulation.current_index)

    def _cuda_synchronize(self) -> None:
        self._simulation.streams.synchronize(self._simulation.current_index)

    def _cuda_sleep(self, cycles: int) -> None:
        self._simulation.streams.sleep(self._simulation.current_index, cycles)

    def _cuda_get_sync_debug_mode(self) -> int:
        return self._simulation.streams.sync_debug_mode

    def _cuda_set_sync_debug_mode(self, mode: int) -> None:
        self._simulation.streams.sync_debug_mode = mode

    def _accelerator_getStream(self, index: int) -> SimulatedStream:
        stream = self._simulation.streams.current(index)
        return self._simulation.stream_type(stream_id=stream, device_index=index)

    def _accelerator_setStream(self, stream: SimulatedStream) -> None:
        self._cuda_setStream(stream.stream_id, stream.device_index)

    def _accelerator_synchronizeDevice(self, index: int) -> None:
        self._simulation.streams.synchronize(self._simulation.device(index).index)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """``Tensor.record_stream``: its memory is not used again before ``stream`` is done."""
        record = self._simulation.storages.of(tensor)
        if record is None:
            raise RuntimeError("record_stream is not implemented for tensors on the CPU")
        if record.address:
            record.allocator.record_stream(record.address, stream.stream_id, stream.device_index)


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace the stream classes wherever torch names them, and what is below them."""
    bound = {"_simulation": simulation, "__module__": "torch"}
    generic = type("Stream", (_AnyStream, SimulatedStream), bound)
    bound = {**bound, "__module__": "torch.cuda"}
    stream = simulation.stream_type = type("Stream", (_CudaStream, generic), bound)
    for module in (torch.cuda, torch.cuda.streams):
        patches.plan(module, "Stream", stream)
        patches.plan(module, "ExternalStream", type("ExternalStream", (_External, stream), {}))
    patches.plan(torch, "Stream", generic)
    api = _Api(simulation)
    plan_functions(api, patches)
    patches.plan(
        torch.Tensor, "register_hook", _register_hook(simulation, torch.Tensor.register_hook)
    )
    patches.plan(
        torch.Tensor, "record_stream", lambda tensor, stream: api.record_stream(tensor, stream)
    )


def _register_hook(simulation: Simulation, register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def register_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        streams = simulation.streams
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


def plan_functions(api: Any, patches: Patches) -> None:
    """Replace the functions of ``torch._C`` that ``api`` has, and the copies of their names.

    A build without CUDA has none of the ``_cuda_`` ones.
    """
    for name in dir(api):
        if name.startswith(("_cuda_", "_host_", "_graph_")) or (
            name.startswith("_accelerator_") and hasattr(torch._C, name)
        ):
            function = getattr(api, name)
            patches.plan(torch._C, name, function)
            for module in (torch.cuda.graphs, torch.cuda.memory):
                if name in vars(module):
                    patches.plan(module, name, function)
