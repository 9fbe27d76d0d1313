"""NVML's readings, the CUDA runtime, NVTX and profilers.

What the allocator knows is answered (memory in use); what only a real device measures is refused by
name; switches that would change no memory do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.autograd.profiler
import torch.profiler

from pytest_gpumem.simulated.callsite import user_line
from pytest_gpumem.simulated.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation

_MEASURED = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
"""Readings of ``torch.cuda`` that no memory model has; all but the first two since 2.1."""

_CUDA = torch.profiler.ProfilerActivity.CUDA
_CPU = torch.profiler.ProfilerActivity.CPU


def plan(simulation: Simulation, patches: Patches) -> None:
    """Answer, refuse or pass over."""
    readings = _Readings(simulation)
    for name in _MEASURED:
        patches.plan(torch.cuda, name, _refusing(name))
    patches.plan(torch.cuda, "device_memory_used", readings.device_memory_used)
    for module in (torch.cuda, torch.cuda.memory):
        patches.plan(module, "list_gpu_processes", readings.list_gpu_processes)
    patches.plan(torch.cuda, "_cudart", Runtime(simulation))
    patches.plan(torch.cuda, "check_error", _check)
    patches.plan(torch.cuda.profiler, "check_error", _check)
    patches.plan(torch.cuda.nvtx, "_nvtx", _Ranges())
    patches.plan(torch.autograd.profiler, "emit_nvtx", _EmitNothing)
    begin = torch.profiler.profile.__init__
    patches.plan(torch.profiler.profile, "__init__", _profiling(simulation, begin))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperatorError(
            f"torch.cuda.{name} at {user_line()} reads a sensor of the GPU, and a simulated one "
            f"has none"
        )

    return refuse


class _Readings:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def device_memory_used(self, device: Any = None) -> int:
        """Bytes that this process holds of the device, without a CUDA context."""
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    def list_gpu_processes(self, device: Any = None) -> str:
        """This process alone, as torch would print it."""
        index = torch.cuda._utils._get_device_index(device, optional=True)
        used = self.device_memory_used(index) / (1024 * 1024)
        return f"GPU:{index}\nprocess {os.getpid():>10d} uses {used:>12.3f} MB GPU memory"


def _check(result: int) -> None: ...


class Runtime:
    """``torch.cuda.cudart()``."""

    class cudaError:  # noqa: N801  # CUDA's own name
        """Result codes."""

        success = 0

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802  # CUDA's own name
        """Free and total bytes."""
        gpu = self._simulation.device(device)
        return gpu.allocator.free_memory, gpu.model.total_memory

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: 0


class _Ranges:
    """``torch._C._nvtx``: ranges for a profiler that is not there."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


class _EmitNothing:
    """``torch.autograd.profiler.emit_nvtx``."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _EmitNothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def _profiling(simulation: Simulation, begin: Callable[..., None]) -> Callable[..., None]:
    def call(profile: Any, *args: Any, activities: Any = None, **options: Any) -> None:
        wanted = [_CPU] if activities is None else list(activities)
        if _CUDA in wanted:
            simulation.note(
                f"torch.profiler at {user_line()} sees no kernels of a simulated GPU, only calls"
            )
            wanted = [_CPU, *(each for each in wanted if each not in (_CUDA, _CPU))]
        begin(profile, *args, activities=wanted, **options)

    return call
