"""The state of a machine with simulated GPUs, and sequence numbers of autograd's nodes.

The numbers decide the order of a backward pass. Each thread numbers the nodes that it makes, from 0
(``at::sequence_number::get_and_increment`` of aten/src/ATen/SequenceNumber.cpp, a
``thread_local``), and the engine runs the ready node with the highest number first
(``CompareNodeTaskTime`` of torch/csrc/autograd/engine.h), torch 2.6 to 2.15. Nodes that
``create_graph=True`` adds are made by the thread of their GPU, which has numbered nothing else, and
therefore have lower numbers than those of the program's own thread. Backward of ``meta`` tensors
runs on the thread that called it, so its nodes get their numbers anew afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.allocator.trace import TraceEntry
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.gpu.catalogue import Machine
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.gpu.releases import PINNED_ALONE
from pytest_gpumem.simulated.machine.dispatch import Dispatch, ThreadState
from pytest_gpumem.simulated.machine.generators import RandomState
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.placement import Placement
from pytest_gpumem.simulated.machine.pool_contents import EveryPoolContents
from pytest_gpumem.simulated.machine.storages import Pinned, SimulatedStorage, Storages
from pytest_gpumem.simulated.machine.streams import (
    OF_LEAVES,
    Capture,
    Streams,
    reachable_nodes,
    roots_of,
)
from pytest_gpumem.simulated.machine.values.assumptions import drawn_seed, is_printing
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.placeholder import PlaceholderFloat
from pytest_gpumem.values.environment import Environment


class GPU(GpuState):
    """A device in a machine."""

    simulation: SimulatedMachine
    """The machine that this device is in."""

    @property
    def stream(self) -> int:
        """The handle of the stream that work goes to now."""
        return self.simulation.streams.current(self.index)

    def waits(self, *, by_torch: bool = True) -> None:
        """Make the host wait for the current stream; torch's debug mode sees its own waits."""
        self.simulation.streams.host_waits(self.index, by_torch=by_torch)

    def copies(self, *pair: Tensor, non_blocking: bool = False) -> None:
        """Wait for a copy between the host's and the GPU's tensor of a ``pair``, if it blocks.

        Raises torch's ``RuntimeError`` in a capture, unless the memory of the host is pinned.
        """
        machine = self.simulation
        is_sent = bool(pair) and machine.pinned.is_sent(*pair, non_blocking=non_blocking)
        if (
            not is_sent
            and self.version >= PINNED_ALONE
            and machine.streams.is_capturing(self.index)
        ):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
                "tensor is pinned. Please use tensor.pin_memory() or allocate the tensor with "
                "pin_memory=True."
            )
        if not non_blocking:
            self.waits()

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Make what a capture needs for its first random operator."""
        capture = self.simulation.capture
        if capture is not None and capture.graph is not None:
            capture.graph.use_random_operator(self, generator)

    @property
    def environment(self) -> Environment:
        """The properties that the numbers of this device depend on."""
        major, minor = self.model.compute_capability
        return Environment(
            simulated=True,
            gpu=Machine(self.model, len(self.simulation.gpus)).name,
            compute_capability=f"{major}.{minor}",
            torch=f"{self.version[0]}.{self.version[1]}",
            alloc_conf=self.alloc_conf,
            cublas_workspace_config=self.cublas_workspace_config,
        )

    @cached_property
    def open_logs(self) -> list[SetupLog]:
        """The contexts of :meth:`logging` that are open."""
        return []

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that readers of the numbers have to know."""
        estimate = self.estimates.note
        return (*self.simulation.notes, *([] if estimate is None else [estimate]))

    @contextmanager
    def logging(self) -> Iterator[SetupLog]:
        """Log allocations inside, so that :meth:`repeat` can repeat them.

        Events in a nested log belong to that log only.
        """
        log = SetupLog()
        trace = self.allocator.trace
        outer = self.open_logs[-1] if self.open_logs else None
        if outer is not None:
            outer.events += trace[outer.position :]
        log.position = len(trace)
        self.open_logs.append(log)
        try:
            yield log
        finally:
            self.open_logs.pop()
            log.events += trace[log.position :]
            if outer is not None:
                outer.position = len(trace)
            addresses = {event.addr for event in log.events}
            log.records = {
                record.address: record
                for record in list(self.simulation.storages.by_key.values())
                if record.address in addresses and record.allocator is self.allocator
            }

    def renew(self) -> None:
        """Replace the allocator by an empty one.

        Live blocks stay in the old one, which no longer counts, unless :meth:`repeat` moves them.
        So a test's state does not depend on earlier tests, down to the last address.
        """
        self.use_memory(self.forget())

    def repeat(self, log: SetupLog) -> RepeatedSetUp:
        """Repeat the events of ``log`` in the present allocator; move storages that still live."""
        memory = self.allocator
        allocated, reserved = memory.allocated, memory.reserved
        peak_allocated, peak_reserved = allocated, reserved
        addresses: dict[int, int] = {}
        for event in log.events:
            if event.action == "alloc":
                address = memory.malloc(event.size, event.stream, event.context)
                addresses[event.addr] = address
                peak_allocated = max(peak_allocated, memory.allocated)
                peak_reserved = max(peak_reserved, memory.reserved)
            elif event.action == "free_completed" and event.addr in addresses:
                memory.free(addresses.pop(event.addr))
        for before, address in addresses.items():
            record = log.records.get(before)
            if record is None or record() is None:
                memory.free(address)
            else:
                record.allocator, record.address = memory, address
        memory.empty_cache()
        return RepeatedSetUp(
            memory.allocated - allocated,
            memory.reserved - reserved,
            peak_allocated - allocated,
            peak_reserved - reserved,
        )

    @property
    def left_behind(self) -> int:
        """Bytes of live blocks that :meth:`renew` did not take along."""
        return sum(
            record.allocator.block(record.address)
            for record in list(self.simulation.storages.by_key.values())
            if record.device is self and record.allocator is not self.allocator and record.address
        )


class RepeatedSetUp(NamedTuple):
    """Bytes that a repeated set-up left allocated and reserved, and its peaks, above its start."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


@dataclass(eq=False)
class SetupLog:
    """Allocator events of a device during a setup, and the storages that lived at its end."""

    events: list[TraceEntry] = field(default_factory=list)
    records: dict[int, SimulatedStorage] = field(default_factory=dict)
    """By address: the storages that lived at its end."""
    position: int = 0


class SimulatedMachine(Notes):
    """State that ``gpus`` and their process share; with ``real_values`` all values are computed."""

    def __init__(self, gpus: Sequence[GPU], *, real_values: bool = False) -> None:
        super().__init__()
        self.gpus = tuple(gpus)
        self.thread_state = ThreadState()
        self.storages = Storages()
        self.values = Values(self.storages, self, everything=real_values)
        self.values.recording = lambda: self.capture.recording if self.capture else None
        self.storages.regrown = self.values.resized
        self.has_real_meta = False
        """Whether the user made meta tensors of their own, which hold no CUDA memory."""
        self.runs_again = False
        """Whether a program that fails by an unknown value runs again, with values."""
        self.leaves_unfilled = False
        """Whether large random tensors on the CPU stay uninitialised."""
        self.placement = Placement(self.storages, self.gpus) if len(self.gpus) > 1 else None
        """Finder of the GPU that an operator runs on; ``None`` where there is only one."""
        self.streams = Streams(self.gpus[0].timeline)
        self.numbering = Numbering()
        self.user_pools, self.graph_pools = count(1), count(1)
        """Numbers of private pools: (0, n) for users' pools, (n, 0) for graphs' own."""
        self.pool_contents = EveryPoolContents(self.values)
        self.storages.died = self.pool_contents.died
        self.random_state = RandomState()
        self.pinned = Pinned()
        self.execution = Dispatch(self.storages)
        self.is_active = False
        """Whether it serves ``cuda`` now."""

    @property
    def current(self) -> GPU:
        """The current CUDA device."""
        return self.gpus[self.thread_state.current_index]

    @property
    def current_index(self) -> int:
        """The index of the current CUDA device of this thread."""
        return self.thread_state.current_index

    @current_index.setter
    def current_index(self, index: int) -> None:
        self.thread_state.current_index = index

    def device(self, index: int | None) -> GPU:
        """Return the GPU ``cuda:index``; raise torch's error for one that does not exist."""
        if index is None:
            return self.current
        if not 0 <= index < len(self.gpus):
            number = len(self.gpus)
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (cuda:{index} on a machine with {number} "
                f"simulated GPU{'s' if number > 1 else ''})"
            )
        return self.gpus[index]

    def device_of(self, *values: Any) -> GPU:
        """Return the GPU that holds the first tensor among ``values``; else the current one."""
        return (self.placement and self.placement.first(values)) or self.current

    def making(self, destination: torch.device) -> AbstractContextManager[None]:
        """Set the device that calls inside request, whatever device torch gets."""
        if destination.type == "meta":
            self.has_real_meta = True
        return having(self.thread_state, "destination", destination)

    def placeholder_value(self, tensor: torch.Tensor) -> PlaceholderFloat | int | None:
        """Return the placeholder for a read of an unknown number: 0, or ``None`` to refuse it.

        Where every value is computed, all reads are refused. An integer has a placeholder only in
        ``item()``, because C++ reads sizes, and only if a program that fails by it runs again with
        values. An integer that torch reads as a seed is drawn.

        Raises :class:`UnknownValueError` where one line reads such numbers without end.
        """
        is_floating = tensor.dtype.is_floating_point
        if is_printing():
            return PlaceholderFloat() if is_floating else 0
        seed = None if is_floating else drawn_seed(self.current_index)
        if seed is not None:
            return seed
        is_integer = self.runs_again and raw.is_integer(tensor.dtype)
        may_be_made_up = is_floating or (is_integer and self.thread_state.reads_item)
        if self.values.everything or not may_be_made_up:
            return None
        line = self.count_read("item()")
        value = PlaceholderFloat() if is_floating else 0
        self.note(f"item() at {line} read a value that is not computed: it got {value}")
        return value

    def reads_placeholder_integers(self, tensor: torch.Tensor, read: str) -> bool:
        """Note and return whether ``read`` of all of an unknown ``tensor`` yields placeholders.

        Raises :class:`UnknownValueError` as :meth:`placeholder_value` does.
        """
        if self.values.everything or not raw.is_integer(tensor.dtype):
            return False
        if tensor.layout is not torch.strided:
            return False
        line = self.count_read(read)
        self.note(f"{read} at {line} read integers that are not computed: each got 0")
        return True

    def kernel_wrote(self, *values: Any) -> None:
        """Forget the values of tensors that a kernel may write to, at each replay of a capture."""
        with self.execution.lock or nullcontext():
            found = ((each, self.storages.of(each)) for each in raw.tensors_in(values))
            written = [(each, record) for each, record in found if record is not None]
            capture = self.capture
            if capture is None:
                for _, record in written:
                    self.values.forget(record.key)
                return
            capture.recording.wrote(tensor for tensor, _ in written)

    @property
    def capture(self) -> Capture | None:
        """The capture that work of this thread goes to now."""
        captures = self.streams.captures
        return captures.get((self.current_index, self.current.stream)) if captures else None

    def end_capture(self, capture: Capture) -> None:
        """End ``capture``; what runs afterwards is not recorded."""
        capture.end()
        captures = self.streams.captures
        for key in [key for key, other in captures.items() if other is capture]:
            del captures[key]

    def abandon_captures(self) -> None:
        """End the captures that a test left open."""
        for capture in set(self.streams.captures.values()):
            self.end_capture(capture)
            capture.memory.pools.release(capture.pool)

    def begin(self, *, has_real_meta: bool) -> None:
        """Begin a test; ``has_real_meta``: its fixtures made meta tensors."""
        self.has_real_meta = has_real_meta
        self.thread_state.on_meta = False

    def forget_reads(self) -> None:
        """Reset the counts of reads, and look up how much memory the host has."""
        self.placeholder_reads.clear()
        self.assumed = False
        self.values.begin()


_next: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Numbering:
    """Counts of autograd nodes made by the program's thread and by that of its GPU."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a test: neither thread has made a node."""
        self._starts = [0]
        """By backward pass: how many nodes the program's thread had made before."""
        self._shifts = [_next()]
        """For each backward pass: difference between the sequence number that a node of the main
        thread gets here and the one it would get on a GPU."""
        self._on_gpu = 0

    def ended(self, began: int) -> Callable[[int], int]:
        """Count the nodes that a backward pass has made since ``began``; return their numbering.

        It maps a node's number to that of a node made by the GPU's thread, in this thread's
        count: on a GPU nodes of the two threads can have the same number, and here, too.
        """
        before, made = self._on_gpu, _next() - began
        self._on_gpu += made
        self._starts.append(began - self._shifts[-1])
        self._shifts.append(self._shifts[-1] + made)

        def number(own: int) -> int:
            on_gpu = before + own - began
            return on_gpu + self._shifts[bisect_right(self._starts, on_gpu) - 1]

        return number


def renumber(results: Iterable[Any], began: int, number: Callable[[int], int]) -> None:
    """Renumber by ``number`` the nodes that lead to ``results`` and were made since ``began``."""
    # A node that is older than the pass leads to older ones only.
    for node in list(reachable_nodes(roots_of(results), lambda node: node._sequence_nr() >= began)):
        own = node._sequence_nr()
        if own != OF_LEAVES:
            node._set_sequence_nr(number(own))


def leaves_of(outputs: Iterable[Any]) -> list[Any]:
    """Return the leaves that the graph of ``outputs`` leads to."""
    found = [getattr(node, "variable", None) for node in reachable_nodes(roots_of(outputs))]
    return [leaf for leaf in found if leaf is not None]
