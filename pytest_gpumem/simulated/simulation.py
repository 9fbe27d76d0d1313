"""A machine with simulated GPUs: what is replaced while it is active."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

# The first meta kernel imports it in any case; imported during a simulation it would keep what is
# patched then for the rest of the process.
import torch._dynamo

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnknownValueError
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.machine import forks
from pytest_gpumem.simulated.machine.placement import Placement
from pytest_gpumem.simulated.machine.storages import Storages
from pytest_gpumem.simulated.machine.values.assumptions import drawn_seed
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.neutral import NeutralFloat
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.described import DESCRIPTIONS
from pytest_gpumem.simulated.operators.tables import installed
from pytest_gpumem.simulated.surface import events, graphs, pools, streams
from pytest_gpumem.simulated.surface.kernels import EXTENSIONS
from pytest_gpumem.simulated.surface.pinned import Pinned
from pytest_gpumem.simulated.surface.plan import plan
from pytest_gpumem.simulated.surface.sequences import be_no_sequences
from pytest_gpumem.simulated.surface.threads import Threads, ThreadState

if TYPE_CHECKING:
    from pytest_gpumem.simulated.gpu.device import SimulatedGPU

_stack: list[Simulation] = []
"""Active simulations, innermost last: what is patched is the process, so the stack is its."""

_LOADING = "CUDA_MODULE_LOADING"

MOST_NOTES = 20
MOST_READS = 10_000
"""Neutral values that one line may read."""


class Simulation:
    """Makes the process believe it has ``gpus``; can be entered and left many times.

    With ``real_values`` every operator is computed on the CPU beside its shapes.
    """

    def __init__(self, gpus: Sequence[SimulatedGPU], *, real_values: bool = False) -> None:
        self.gpus = tuple(gpus)
        self.storages = Storages()
        self.values = Values(self, everything=real_values)
        self.storages.died = self.values.died
        self.storages.regrown = self.values.resized
        self.neutral_reads: Counter[str] = Counter()
        """By line: how often a neutral value was read there."""
        self.granted = False
        """Whether a condition on unknown values was answered by an assumption."""
        self.here = ThreadState()
        self.has_real_meta = False
        """Whether the user made meta tensors of their own, which hold no CUDA memory."""
        self.notes: dict[str, None] = {}
        self.autocast = CastCache(self.gpus[0].version)
        self.placement = Placement(self.storages, self.gpus) if len(self.gpus) > 1 else None
        """Which GPU an operator runs on; ``None`` where there is but one."""
        self.streams = streams.Streams(self.gpus[0].timeline)
        self.stream_type: type[streams.SimulatedStream]
        self.event_type: type[events.SimulatedEvent]
        self.pool_ids = graphs.PoolIds()
        self.pool_contents = graphs.EveryPoolContents()
        self.active_pools = pools.ActivePool()
        self.random_state = graphs.RandomState()
        self.execution = ShapeExecution(self)
        self.threads = Threads(self)
        self.pinned = Pinned(self.streams)
        self._patches = Patches()
        # What is replaced has to be torch's own, and not what an active simulation has put there.
        with _suspended():
            plan(self, self._patches)
            self.threads.plan(self._patches)
            self.pinned.plan(self, self._patches)
        self._resources: ExitStack | None = None

    @property
    def current(self) -> SimulatedGPU:
        """The current CUDA device."""
        return self.gpus[self.here.current_index]

    @property
    def current_index(self) -> int:
        """The index of the current CUDA device of this thread."""
        return self.here.current_index

    @current_index.setter
    def current_index(self, index: int) -> None:
        self.here.current_index = index

    @property
    def is_active(self) -> bool:
        """Whether it serves ``cuda`` now."""
        return bool(_stack) and _stack[-1] is self

    def device(self, index: int | None) -> SimulatedGPU:
        """The GPU that ``cuda:index`` names; raises torch's error for one that is not there."""
        if index is None:
            return self.current
        if not 0 <= index < len(self.gpus):
            count = len(self.gpus)
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (cuda:{index} on a machine with {count} "
                f"simulated GPU{'s' if count > 1 else ''})"
            )
        return self.gpus[index]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Serve ``cuda`` from here; an enclosing simulation is suspended meanwhile."""
        if _stack and _stack[-1] is self:
            yield
            return
        with _suspended():
            self._enter()
            _stack.append(self)
            try:
                yield
            finally:
                _stack.pop()
                self._leave()

    @contextmanager
    def making(self, destination: torch.device) -> Iterator[None]:
        """What is made inside was asked for on ``destination``, whatever torch is told."""
        if destination.type == "meta":
            self.has_real_meta = True
        before, self.here.destination = self.here.destination, destination
        try:
            yield
        finally:
            self.here.destination = before

    def neutral_value(self, tensor: torch.Tensor) -> NeutralFloat | int | None:
        """What reading an unknown number yields: 0.0 for floating point, else ``None``.

        Nor where every value is computed: one that could not be is not made up. An integer that
        torch reads for a seed is drawn.

        Raises :class:`UnknownValueError` where one line reads such numbers without end.
        """
        if not tensor.dtype.is_floating_point:
            return drawn_seed(self)
        if self.values.everything:
            return None
        line = self.count_read("item()")
        self.note(f"item() at {line} read a value that shapes do not have: it got 0.0")
        return NeutralFloat()

    def reads_neutral_integers(self, tensor: torch.Tensor, read: str) -> bool:
        """Whether ``read``, of all of an unknown ``tensor``, yields neutral integers; notes it.

        Raises :class:`UnknownValueError` as :meth:`neutral_value` does.
        """
        dtype = tensor.dtype
        if self.values.everything or dtype.is_floating_point or dtype.is_complex:
            return False
        if dtype is torch.bool or tensor.layout is not torch.strided:
            return False
        line = self.count_read(read)
        self.note(f"{read} at {line} read integers that shapes do not have: each got 0")
        return True

    def note_finite(self) -> None:
        """Say that code reads whether unknown numbers are finite, which is taken for granted.

        Raises :class:`UnknownValueError` where one line does so without end.
        """
        line = self.count_read("a search for infinities and NaN")
        self.granted = True
        self.note(
            f"{line} looks for infinities or NaN in numbers that shapes do not have: they were "
            f"taken for finite"
        )

    def count_read(self, name: str) -> str:
        """Count a read of what a simulated GPU does not have; return its line.

        Raises :class:`UnknownValueError` where one line reads without end.
        """
        line = user_line()
        self.neutral_reads[line] += 1
        if self.neutral_reads[line] > MOST_READS:
            raise UnknownValueError(
                f"{name} at {line} read values that a simulated GPU does not have {MOST_READS:,} "
                f"times: a loop that waits for one of them would never end"
            )
        return line

    def forget_reads(self) -> None:
        """Begin anew to count what is read, and to see what the host has room for."""
        self.neutral_reads.clear()
        self.granted = False
        self.values.begin()

    def note(self, sentence: str) -> None:
        """Remember a sentence that readers of the numbers have to know."""
        if len(self.notes) < MOST_NOTES:
            self.notes[sentence] = None

    def _enter(self) -> None:
        with ExitStack() as resources:
            self._patches.apply()
            be_no_sequences()
            resources.callback(self._patches.undo)
            resources.enter_context(_as_initialized())
            lifts = torch._C._only_lift_cpu_tensors()
            # torch.tensor(..., device="cuda") then builds on the CPU and copies in sight of a mode.
            torch._C._set_only_lift_cpu_tensors(True)
            resources.callback(torch._C._set_only_lift_cpu_tensors, lifts)
            # What was compiled before the simulation runs eagerly too.
            resources.enter_context(torch.compiler.set_stance("force_eager"))
            resources.enter_context(EXTENSIONS.guarded())
            resources.enter_context(DESCRIPTIONS.served())
            resources.enter_context(installed(self))
            resources.enter_context(self.execution)
            self.here.joined = True
            resources.callback(setattr, self.here, "joined", False)
            self._resources = resources.pop_all()

    def _leave(self) -> None:
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()


@contextmanager
def _as_initialized() -> Iterator[None]:
    """What ``_lazy_init()`` of torch/cuda/__init__.py leaves in the environment."""
    if _LOADING in os.environ:
        yield
        return
    os.environ[_LOADING] = "LAZY"
    try:
        yield
    finally:
        os.environ.pop(_LOADING, None)


@contextmanager
def _suspended() -> Iterator[None]:
    """Take the active simulation away inside."""
    outer = _stack[-1] if _stack else None
    if outer is not None:
        outer._leave()
    try:
        yield
    finally:
        if outer is not None:
            outer._enter()


def active_simulation() -> Simulation | None:
    """The simulation that serves ``cuda`` now."""
    return _stack[-1] if _stack else None


def _forked() -> None:
    for simulation in _stack:
        simulation.execution.forked()


forks.after_fork(_forked)
