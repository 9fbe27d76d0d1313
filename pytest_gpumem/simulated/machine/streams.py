"""Streams: the stream that memory belongs to, and the work that other work waits for.

To a program, work is done when it is issued: queries return true. Memory that another stream used
may be used again once the *host* has seen that stream's work finish; the
:class:`~pytest_gpumem.allocator.trace.Timeline` keeps that.

Autograd gives a leaf its gradient on the stream that used the leaf first: its node is made when an
operator first uses it, and keeps the stream of that moment (``Node::stream`` of
torch/csrc/autograd/function.h). Of the nodes that lead to the leaf, the one with the lowest
sequence number was made first.

A gradient that a node passes to one on another stream is used there: it is recorded on that stream,
which waits for it (``InputBuffer::add`` of torch/csrc/autograd/input_buffer.cpp, 2.6 to 2.15).
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.autograd.graph

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.allocator.trace import Marks, StreamKey, Timeline
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.machine.pool_contents import GraphRecording
from pytest_gpumem.simulated.machine.storages import SimulatedStorage

STREAMS_PER_POOL = 32
"""kStreamsPerPool of c10/cuda/CUDAStream.cpp: after these the first stream is returned again."""
HIGHEST_PRIORITY = -3
"""torch compiles four priorities, 0 to -3; GPUs since Volta have six."""
_TYPE_BITS = 4
_WARN, _ERROR = 1, 2
_SYNCHRONIZES = "called a synchronizing CUDA operation"
"""warn_or_error_on_sync of c10/cuda/CUDAFunctions.cpp."""


class Capture:
    """A capture under way, on the stream it began on and those that wait for it."""

    def __init__(self, gpu: GpuState, pool: PoolId, recording: GraphRecording, graph: Any) -> None:
        self.gpu = gpu
        self.pool = pool
        self.stream = gpu.stream
        self.memory = gpu.allocator
        self.recording = recording
        self.graph = graph
        """The graph; ``None`` after the capture, which the graph refers to."""
        self.under_way = True
        self.valid = True
        """Whether every operation so far is allowed in a capture."""

    @property
    def is_empty(self) -> bool:
        """Whether the graph would have no node yet: an ``empty`` adds none."""
        steps = self.recording.steps
        return all(step.operator is not None and step.operator.uninitialized for step in steps)

    def end(self) -> None:
        """End the capture, whose memory stays in its pool."""
        self.under_way, self.graph = False, None
        self.memory.captures -= 1
        self.memory.end_allocate_to_pool(self.pool)


class _ThreadStreams(threading.local):
    """The current stream of each device, separately for each thread."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}
        self.in_node: dict[int, tuple[int, int, int]] = {}
        """By device: graph task, node and stream, where a backward hook chose another stream."""
        self.of_last_node: dict[int, int] = {}
        self.hooked: torch.Tensor | None = None
        """The leaf whose hook runs: autograd has no current node then."""
        self.first: dict[int, int] = {}
        """By leaf of the graph that runs backward: the number of the node that used it first."""
        self.chosen: dict[int, tuple[list[int], list[int]]] = {}
        """By device: autograd's sequence number (of this thread) at each choice of a stream, and
        the chosen stream."""


class Streams:
    """The streams of a machine: current ones, captures, and the order between them."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.used = False
        """Whether there ever was any stream but the default one."""
        self.sync_debug_mode = 0
        """The mode that ``torch.cuda.set_sync_debug_mode`` set."""
        self.captures: dict[StreamKey, Capture] = {}
        """The capture under way on each stream."""
        self._thread = _ThreadStreams()
        self._made: dict[tuple[int, int], int] = {}

    def current(self, device: int) -> int:
        """Return the handle of the stream that work on ``device`` goes to; 0 is the default stream.

        Autograd runs a node on the stream on which its forward ran.
        """
        if not self.used:
            return 0
        task = torch._C._current_graph_task_id()
        if task != -1:
            return self._of_node(device, task)
        return self._thread.current.get(device, 0)

    def choose(self, device: int, stream: int) -> None:
        """Make ``stream`` the current one of ``device``, for this thread."""
        if not self.used and stream == 0:
            return
        self.used = True
        self.timeline.note((device, stream))
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._thread.in_node[device] = (task, _node_sequence(), stream)
            return
        self._thread.current[device] = stream
        numbers, streams = self._thread.chosen.setdefault(device, ([], []))
        numbers.append(torch._C._autograd._get_sequence_nr())
        streams.append(stream)

    @property
    def are_there(self) -> bool:
        """Whether the program has made or used a stream of its own."""
        return self.used or bool(self._made)

    def reset(self, *, keep: bool) -> None:
        """Forget the settings of a test and, unless ``keep``, that streams were ever used."""
        self.sync_debug_mode = 0
        if not keep:
            self.used = False
            self._thread = _ThreadStreams()
            self._made.clear()

    def make(self, device: int, priority: int) -> int:
        """Return the handle of a stream from the pool of its device and priority, in turn."""
        level = min(max(-priority, 0), -HIGHEST_PRIORITY)
        made = self._made.get((device, level), 0)
        self._made[device, level] = made + 1
        # makeStreamId: the index, the kind (1 and up: pools), and a bit for torch's own streams.
        return (made % STREAMS_PER_POOL) << (_TYPE_BITS + 1) | (level + 1) << 1 | 1

    def is_capturing(self, device: int) -> bool:
        """Return whether the current stream of ``device`` is being captured."""
        return bool(self.captures) and (device, self.current(device)) in self.captures

    def host_waits(self, device: int, *, by_torch: bool = True) -> None:
        """Make the host wait for the current stream: it reads or writes memory of ``device``."""
        if by_torch and self.sync_debug_mode == _WARN:
            warnings.warn(_SYNCHRONIZES, stacklevel=3)
        elif by_torch and self.sync_debug_mode == _ERROR:
            raise RuntimeError(_SYNCHRONIZES)
        if self.used:
            key = (device, self.current(device))
            self.refuse_in_capture(key)
            self.timeline.finish_stream(key)

    def synchronize(self, device: int) -> None:
        """Make the host wait for every stream of ``device``."""
        for key in self.captures:
            self.refuse_in_capture(key)
        if self.used:
            self.timeline.finish_device(device)

    def refuse_in_capture(self, key: StreamKey) -> None:
        """Raise CUDA's error for a wait during a capture, which becomes invalid."""
        capture = self.captures.get(key)
        if capture is not None:
            capture.valid = False
            raise cuda_error("operation not permitted when stream is capturing")

    def waits(self, key: StreamKey, marks: Marks, capture: Capture | None) -> None:
        """Make a stream wait for an event, and join the ``capture`` that the event belongs to."""
        self.timeline.wait(key, marks)
        if capture is not None and capture.under_way:
            self.captures.setdefault(key, capture)

    def _of_node(self, device: int, task: int) -> int:
        thread = self._thread
        number = _node_sequence()
        chosen = thread.in_node.get(device)
        if chosen is not None and chosen[:2] == (task, number):
            return chosen[2]
        number = self._number(torch._C._current_autograd_node())
        if number == OF_LEAVES:
            stream = thread.of_last_node.get(device, 0)
        else:
            stream = thread.of_last_node[device] = self._at(device, number)
        # The engine makes the stream of each node wait for those of its inputs
        # (torch/csrc/autograd/input_buffer.cpp), and those of the roots for the current stream. So
        # they join that one's capture; the default stream joins none.
        if self.captures and stream:
            capture = self.captures.get((device, thread.current.get(device, 0)))
            if capture is not None:
                self.captures.setdefault((device, stream), capture)
        return stream

    def _at(self, device: int, number: int) -> int:
        """Return the current stream of ``device`` when autograd's node ``number`` was made."""
        numbers, streams = self._thread.chosen.get(device, ((), ()))
        position = bisect_right(numbers, number)
        return streams[position - 1] if position else 0

    @contextmanager
    def passing(
        self, outputs: Any, gradients: Any, block_of: Callable[[Any], SimulatedStorage | None]
    ) -> Iterator[None]:
        """Run the graph of ``outputs`` backward inside, from their ``gradients``.

        Nodes are not held meanwhile: each dies, with what it has saved, where it has run.
        """
        if not self.used:
            yield
            return
        with having(self._thread, "first", _first_uses(outputs)), ExitStack() as hooks:
            leaves = self._watch(outputs, block_of, hooks)
            for node, gradient in zip(map(_node_of, outputs), gradients, strict=False):
                if node is not None:
                    self._follow([gradient], [self.current], self._stream_of(node), block_of)
            yield
            # The caller's stream waits for those of leaves (exec_post_processing of engine.cpp).
            for device, of in leaves:
                self._joins(device, of(device), self.current(device))

    def _watch(
        self, outputs: Any, block_of: Callable[[Any], SimulatedStorage | None], hooks: ExitStack
    ) -> list[tuple[int, _Stream]]:
        """Hook nodes with gradients of other streams; return the devices and streams of leaves.

        A hook before a node: one after it would keep the gradients that the node is given.
        """
        leaves, sources = [], defaultdict[Any, list[_Stream]](list)
        for node in reachable_nodes(roots_of(outputs)):
            of = self._stream_of(node)
            block = block_of(node.variable) if hasattr(node, "variable") else None
            if block is not None:
                leaves.append((block.device.index, of))
            for to in filter(None, (one for one, _ in node.next_functions)):
                target = self._stream_of(to)
                if any(target(device) != of(device) for device in self._thread.chosen):
                    sources[to].append(of)
        for node, given in sources.items():
            follow = functools.partial(
                self._follow, sources=given, target=self._stream_of(node), block_of=block_of
            )
            hooks.callback(node.register_prehook(follow).remove)
        return leaves

    def _follow(
        self,
        gradients: Iterable[Any],
        sources: Iterable[_Stream],
        target: _Stream,
        block_of: Callable[[Any], SimulatedStorage | None],
    ) -> None:
        """Record ``gradients`` of the streams ``sources`` on ``target``, which waits for those."""
        for gradient in gradients:
            block = block_of(gradient) if isinstance(gradient, torch.Tensor) else None
            if block is not None and block.address:
                device = block.device.index
                joined = [self._joins(device, of(device), target(device)) for of in sources]
                if any(joined):
                    block.allocator.record_stream(block.address, target(device))

    def _stream_of(self, node: Any) -> _Stream:
        """Return the function from a device to its stream on which ``node`` runs."""
        return functools.partial(self._at, number=self._number(node))

    def _number(self, node: Any) -> int:
        """Return the sequence number of ``node``; of a leaf's, that of the node that used it first.

        No node stands for that of the leaf whose hook runs.
        """
        leaf = self._thread.hooked if node is None else getattr(node, "variable", None)
        if leaf is not None:
            return self._thread.first.get(leaf._cdata, OF_LEAVES)
        return OF_LEAVES if node is None else int(node._sequence_nr())

    def _joins(self, device: int, source: int, target: int) -> bool:
        """Make the stream ``target`` wait for ``source``, if that is another one."""
        if source != target:
            self.timeline.wait((device, target), self.timeline.mark((device, source)))
        return source != target

    def hooked(self, leaf: torch.Tensor, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``hook`` of a leaf, which autograd runs before it sets the current node."""
        reference = weakref.ref(leaf)

        @functools.wraps(hook)
        def call(gradient: Any) -> Any:
            with having(self._thread, "hooked", reference()):
                return hook(gradient)

        return call


def _node_sequence() -> int:
    node = torch._C._current_autograd_node()
    return OF_LEAVES if node is None else int(node._sequence_nr())


def cuda_error(text: str) -> RuntimeError:
    """Return an error of the CUDA runtime as torch raises it; a class of its own since 2.8."""
    error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    return error(f"CUDA error: {text}")


def priority_of(stream: int) -> int:
    """Return the priority of a handle of :meth:`Streams.make`; 0 for other handles."""
    kind = stream >> 1 & (1 << _TYPE_BITS) - 1
    return 1 - kind if stream & 1 and 1 <= kind <= 1 - HIGHEST_PRIORITY else 0


_Stream = Callable[[int], int]
"""(device) -> stream"""

OF_LEAVES = 2**64 - 1
"""Sequence number of the nodes that accumulate gradients into leaves."""


def _first_uses(outputs: Iterable[Any]) -> dict[int, int]:
    """Return the lowest sequence number of a node that leads to each leaf, by the leaf."""
    first: dict[int, int] = {}
    for node in reachable_nodes(roots_of(outputs)):
        for following, _ in node.next_functions:
            if (leaf := getattr(following, "variable", None)) is not None:
                number = min(node._sequence_nr(), first.get(leaf._cdata, OF_LEAVES))
                first[leaf._cdata] = number
    return first


def roots_of(outputs: Iterable[Any]) -> list[Any]:
    """Return the nodes that have made ``outputs``, tensors or autograd's edges."""
    return [node for node in map(_node_of, outputs) if node is not None]


def _node_of(output: Any) -> Any:
    return getattr(output, "grad_fn", None) or getattr(output, "node", None)


def reachable_nodes(
    roots: list[Any], is_followed: Callable[[Any], bool] = lambda _: True
) -> Iterator[Any]:
    """Yield the nodes that ``roots`` lead to through nodes that ``is_followed`` accepts."""
    waiting = list(dict.fromkeys(roots))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if is_followed(node):
            yield node
            new = {following for following, _ in node.next_functions} - seen - {None}
            seen |= new
            waiting += new
