"""A machine with simulated GPUs: what is replaced while it is active."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

# The first meta kernel imports it in any case; imported during a simulation it would keep what is
# patched then for the rest of the process.
import torch._dynamo

from pytest_gpumem.simulated import operators, surface
from pytest_gpumem.simulated.callsite import user_line
from pytest_gpumem.simulated.execution import ShapeExecution
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.patching import Patches
from pytest_gpumem.simulated.storages import Storages

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

_stack: list[Simulation] = []
"""Active simulations, innermost last: what is patched is the process, so the stack is its."""

MOST_NOTES = 20


class Simulation:
    """Makes the process believe it has ``gpus``; can be entered and left many times."""

    def __init__(self, gpus: Sequence[SimulatedGPU]) -> None:
        self.gpus = tuple(gpus)
        self.storages = Storages()
        self.current_index = 0
        self.has_real_meta = False
        """Whether the user made meta tensors of their own, which hold no CUDA memory."""
        self.making_real_meta = False
        self.destination: str | None = None
        """Where ``Tensor.to`` is moving a tensor, which ``meta`` alone does not tell."""
        self.notes: dict[str, None] = {}
        self.autocast = CastCache()
        self.execution = ShapeExecution(self)
        self._patches = Patches()
        surface.plan(self, self._patches)
        self._resources: ExitStack | None = None

    @property
    def current(self) -> SimulatedGPU:
        """The current CUDA device."""
        return self.gpus[self.current_index]

    def device(self, index: int | None) -> SimulatedGPU:
        """The GPU that ``cuda:index`` names; raises torch's error for one that is not there."""
        if index is None:
            return self.current
        if not 0 <= index < len(self.gpus):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (cuda:{index} on a machine with "
                f"{len(self.gpus)} simulated GPU)"
            )
        return self.gpus[index]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Serve ``cuda`` from here; an enclosing simulation is suspended meanwhile."""
        if _stack and _stack[-1] is self:
            yield
            return
        outer = _stack[-1] if _stack else None
        if outer is not None:
            outer._leave()
        try:
            self._enter()
            _stack.append(self)
            try:
                yield
            finally:
                _stack.pop()
                self._leave()
        finally:
            if outer is not None:
                outer._enter()

    def neutral_value(self, tensor: torch.Tensor) -> float | None:
        """What reading an unknown number yields: 0.0 for floating point, else ``None``.

        Zero lets loss scaling and logging go on (no infinity was found, the loss is finite).
        """
        if not tensor.dtype.is_floating_point:
            return None
        self.note(f"item() at {user_line()} read a value that shapes do not have: it got 0.0")
        return 0.0

    def note(self, sentence: str) -> None:
        """Remember a sentence that readers of the numbers have to know."""
        if len(self.notes) < MOST_NOTES:
            self.notes[sentence] = None

    def _enter(self) -> None:
        with ExitStack() as resources:
            self._patches.apply()
            resources.callback(self._patches.undo)
            lifts = torch._C._only_lift_cpu_tensors()
            # torch.tensor(..., device="cuda") then builds on the CPU and copies in sight of a mode.
            torch._C._set_only_lift_cpu_tensors(True)
            resources.callback(torch._C._set_only_lift_cpu_tensors, lifts)
            # What was compiled before the simulation runs eagerly too.
            resources.enter_context(torch.compiler.set_stance("force_eager"))
            resources.enter_context(operators.installed(self))
            resources.enter_context(self.execution)
            self._resources = resources.pop_all()

    def _leave(self) -> None:
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()


def active_simulation() -> Simulation | None:
    """The simulation that serves ``cuda`` now."""
    return _stack[-1] if _stack else None
