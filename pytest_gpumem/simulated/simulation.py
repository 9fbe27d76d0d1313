"""Simulated GPUs of the process: the replaced names while a simulation is active."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gpumem.allocator.trace import Timeline
from pytest_gpumem.garbage import paused
from pytest_gpumem.late_modules import changing, watched
from pytest_gpumem.simulated.common.patching import Patches, patched_when_imported
from pytest_gpumem.simulated.compiled.entry import AUTO, Compilation
from pytest_gpumem.simulated.distributed import replacements as distributed
from pytest_gpumem.simulated.distributed.nccl import Communicator
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_machine
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.custom_kernels import DESCRIPTIONS
from pytest_gpumem.simulated.operators.engine import references_of_sole_owner
from pytest_gpumem.simulated.operators.tables import installed
from pytest_gpumem.simulated.stand_ins.imports import make_importable
from pytest_gpumem.simulated.surface import (
    autocast,
    backends,
    checkpoints,
    compilers,
    cuda,
    factories,
    gradients,
    kernels,
    legacy,
    monitoring,
    pools,
    several,
    storages,
    streams,
    tensors,
    triton,
    unsupported,
    wrappers,
)
from pytest_gpumem.simulated.surface.checkpoints import loading_on
from pytest_gpumem.simulated.surface.cuda import answers_for_gpu
from pytest_gpumem.simulated.surface.factories import stop_being_sequences
from pytest_gpumem.simulated.surface.kernels import COMPILES, EXTENSIONS, plan_compiling
from pytest_gpumem.simulated.surface.threads import Threads
from pytest_gpumem.values.world import World

_stack: list[Simulation] = []
"""Active simulations, innermost last: they replace names of the whole process."""

_PARTS = (
    *(tensors, gradients, factories, cuda, several, streams, pools),
    *(checkpoints, backends, kernels, monitoring, storages, unsupported, wrappers, legacy),
)
"""The parts of the surface, in the order in which their replacements are added."""

_LOADING = "CUDA_MODULE_LOADING"
"""The environment variable that ``_lazy_init()`` of torch/cuda/__init__.py sets."""


class SimulatedGPU(GPU):
    """A CUDA device that computes shapes only."""

    simulation: Simulation

    @classmethod
    def machine(
        cls,
        name: str | GpuModel | Machine,
        *,
        world: World | None = None,
        real_values: bool = False,
        stand_ins: bool = True,
        compile: str = AUTO,
        **settings: Any,
    ) -> tuple[SimulatedGPU, ...]:
        """Return the GPUs of machine ``name``, like ``"A100-80GB*2"``: ``cuda:0``, ``cuda:1``, ...

        With a ``world`` it is that rank's machine, with ``local_size`` GPUs. The options are those
        of :class:`Simulation`, and ``settings`` and errors those of
        :class:`~pytest_gpumem.simulated.gpu.device.GpuState`.
        """
        machine = find_machine(name)
        timeline = Timeline()
        count = machine.count if world is None else world.local_size
        gpus = tuple(
            cls(machine.model, index=i, timeline=timeline, **settings) for i in range(count)
        )
        simulation = Simulation(
            gpus, real_values=real_values, stand_ins=stand_ins, compile=compile, world=world
        )
        for gpu in gpus:
            gpu.simulation = simulation
        return gpus

    @contextmanager
    def active(self) -> Iterator[SimulatedGPU]:
        """Serve ``cuda`` from this device."""
        with self.simulation.active():
            yield self


class Simulation(SimulatedMachine):
    """Simulated GPUs in this process; can be entered and left many times.

    With ``real_values`` every operator is also computed on the CPU. With ``stand_ins``
    flash-attn can be imported inside where it is not installed. In a ``world`` the process is
    one of its ranks.
    """

    execution: ShapeExecution

    def __init__(
        self,
        gpus: Sequence[GPU],
        *,
        real_values: bool = False,
        stand_ins: bool = True,
        compile: str = AUTO,
        world: World | None = None,
    ) -> None:
        super().__init__(gpus, real_values=real_values)
        self._stand_ins = stand_ins
        self.world = world
        self.current_index = self.first_index
        self.execution = ShapeExecution(self)
        self._casts = CastCache(self.gpus[0].version)
        self.threads = Threads(self, self._joining)
        self.compilation = Compilation(
            self,
            compile,
            self._unpatched_for_compilers,
            self._unpatched,
            self._patched_again,
            self.threads.exclusive.taken,
        )
        self._patches = Patches()
        self._triton_patches = Patches()
        """Replacements in Triton, which is slow to import, and which few tests need."""
        # Patches keep what they replace: that has to be torch's, not an active simulation's.
        with _suspended():
            for part in _PARTS:
                part.add_patches(self, self._patches)
            autocast.add_patches(self._casts, self._patches)
            # A build without CUDA lacks most of these.
            self._patches.join_missing(torch._C)
            self.threads.add_patches(self._patches)
            self.communicators: dict[str, Communicator] = {}
            self._single_rank = distributed.add_patches(
                self, self.execution, world, self._patches, self.communicators
            )
            self._patches.join_inherited(torch.Tensor)
            self._patches.join_inherited(torch.UntypedStorage)
        self._resources: ExitStack | None = None

    @property
    def first_index(self) -> int:
        """The index of the GPU that is current when the process begins."""
        return 0 if self.world is None else self.world.local_rank

    @contextmanager
    def active(self) -> Iterator[None]:
        """Serve ``cuda`` inside; an enclosing simulation is suspended for that time."""
        if self.is_active:
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

    def _enter(self) -> None:
        references_of_sole_owner()
        with ExitStack() as resources:
            for patches in (self._patches, self.threads.exclusive.patches):
                resources.enter_context(patches.applied())
            resources.callback(self._triton_patches.undo)
            resources.enter_context(self._single_rank.restored())
            self._follow_imports()
            imported = changing({"triton": lambda _: self._follow_imports()}, self._unpatched)
            resources.enter_context(watched(imported))
            if _LOADING not in os.environ:
                os.environ[_LOADING] = "LAZY"
                resources.callback(os.environ.pop, _LOADING, None)
            lifts = torch._C._only_lift_cpu_tensors()
            # torch.tensor(..., device="cuda") then builds on the CPU, and modes see the copy.
            torch._C._set_only_lift_cpu_tensors(True)
            resources.callback(torch._C._set_only_lift_cpu_tensors, lifts)
            resources.enter_context(compilers.deferred(self._unpatched, self.compilation.hooked))
            resources.enter_context(patched_when_imported({COMPILES: plan_compiling}))
            resources.enter_context(EXTENSIONS.guarded())
            resources.enter_context(loading_on(self))
            resources.enter_context(DESCRIPTIONS.replace_described(self.kernel_wrote))
            if self._stand_ins:
                resources.enter_context(make_importable(self.note))
            resources.enter_context(installed(self, self._casts))
            resources.enter_context(tensors.answering(self))
            resources.enter_context(self.execution)
            self.is_active = self.thread_state.joined = True
            self.threads.first = get_ident()
            self._resources = resources.pop_all()

    def _follow_imports(self) -> None:
        stop_being_sequences()
        if not self._patches.are_applied or triton.ARE_IN not in sys.modules:
            return
        if not self._triton_patches.added:
            triton.add_patches(self, self._triton_patches)
        if not self._triton_patches.are_applied:
            self._triton_patches.apply()

    @contextmanager
    def _unpatched(self) -> Iterator[None]:
        """Restore torch's names and remove modes inside, but keep the patches that threads need."""
        if not (self._patches.are_applied and self.threads.exclusive.is_mine):
            yield
            return
        try:
            with (
                self._patches.paused(),
                self._triton_patches.paused(),
                self._single_rank.patches.paused(),
                _disable_current_modes(),
                _without_function_modes(),
                paused(),
            ):
                yield
        finally:
            self._follow_imports()

    @contextmanager
    def _unpatched_for_compilers(self) -> Iterator[None]:
        """Restore torch's names inside, but for those that compilers ask about the GPU."""
        with (
            self._patches.paused(but=answers_for_gpu),
            self._triton_patches.paused(but=triton.is_driver),
            self._single_rank.patches.paused(),
        ):
            yield

    @contextmanager
    def _patched_again(self) -> Iterator[None]:
        """Apply all replacements again inside, for code that runs while a compiler is at work."""
        with (
            self._patches.resumed(),
            self._triton_patches.resumed(),
            self._single_rank.patches.resumed(),
            self._joining(),
        ):
            yield

    def _leave(self) -> None:
        resources, self._resources = self._resources, None
        self.is_active = self.thread_state.joined = False
        if resources is not None:
            resources.close()

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Allow this thread, which has not entered the simulation, to run operators inside."""
        with self._casts.reachable_on_thread(), self.execution:
            yield


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Remove function modes inside: ``with torch.device(...)`` and the user's own."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def _suspended() -> Iterator[None]:
    """Suspend the active simulation inside."""
    outer = _stack[-1] if _stack else None
    if outer is not None:
        outer._leave()
    try:
        yield
    finally:
        if outer is not None:
            outer._enter()


def active_simulation() -> Simulation | None:
    """Return the simulation that serves ``cuda`` now."""
    return _stack[-1] if _stack else None


def _forked() -> None:
    for simulation in _stack:
        simulation.execution.forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
