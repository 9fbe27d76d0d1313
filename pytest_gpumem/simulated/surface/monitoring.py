"""NVML's readings, the CUDA runtime, NVTX and profilers.

Readings that the allocator knows are answered (memory in use). A sensor reads 0, with a note: a
simulated GPU runs no kernels, uses no power and has no clock. Switches that change no memory
do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.autograd.profiler
import torch.profiler

from pytest_gpumem.simulated.common.callsite import refusing, user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import ALREADY_REGISTERED, NOT_REGISTERED

_MEASURED = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
"""Readings of ``torch.cuda`` that are not modelled; all but the first two exist since 2.1."""

_index_of = torch.cuda._utils._get_device_index
_CUDA = torch.profiler.ProfilerActivity.CUDA
_CPU = torch.profiler.ProfilerActivity.CPU


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace functions by answers, refusals or no-ops."""
    for name in _MEASURED:
        patches.add(torch.cuda, name, partial(_read, machine, name))
    patches.add(torch.cuda, "device_memory_used", _memory_used)
    for module in (torch.cuda, torch.cuda.memory):
        patches.add(module, "list_gpu_processes", _list_gpu_processes)
    patches.add(torch.cuda, "_cudart", Runtime(machine))
    patches.add(torch.cuda.nvtx, "_nvtx", _Ranges())
    patches.add(torch.autograd.profiler, "emit_nvtx", lambda *_, **__: nullcontext())

    def profiling(
        begin: Any, profile: Any, *args: Any, activities: Any = None, **options: Any
    ) -> None:
        wanted = [_CPU] if activities is None else list(activities)
        if _CUDA in wanted:
            machine.note(
                f"torch.profiler at {user_line()} sees no kernels of a simulated GPU, only calls"
            )
            wanted = [_CPU, *(each for each in wanted if each not in (_CUDA, _CPU))]
        begin(profile, *args, activities=wanted, **options)

    patches.wrap(torch.profiler.profile, "__init__", profiling)
    # The timeline's exports and torch.cuda._memory_viz begin with it.
    patches.add(torch.profiler.profile, "_memory_profile", _refuse_timeline)


def _read(machine: SimulatedMachine, name: str, device: Any = None) -> int:
    """Return 0 for a sensor, with a note."""
    _index_of(device, optional=True)
    line = machine.count_read(f"torch.cuda.{name}()")
    machine.note(
        f"torch.cuda.{name}() at {line} read a sensor that a simulated GPU does not have: it got 0"
    )
    return 0


def _memory_used(device: Any = None) -> int:
    """Return the bytes of the device that this process uses, without a CUDA context."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _list_gpu_processes(device: Any = None) -> str:
    """Return a table with this process only, in torch's format."""
    index = _index_of(device, optional=True)
    used = _memory_used(index) / (1024 * 1024)
    return f"GPU:{index}\nprocess {os.getpid():>10d} uses {used:>12.3f} MB GPU memory"


class _Error(int):
    """``torch.cuda.cudart().cudaError``: result codes of the CUDA runtime (driver_types.h)."""

    success = 0


_ERRORS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    ALREADY_REGISTERED: "part or all of the requested memory range is already mapped",
    NOT_REGISTERED: "pointer does not correspond to a registered memory region",
}
"""Texts of ``cudaGetErrorString`` for the commonest codes."""


class Runtime:
    """``torch.cuda.cudart()``: the functions that torch binds (torch/csrc/cuda/shared/cudart.cpp).

    Functions without an entry here do nothing, and succeed.
    """

    cudaError = _Error  # noqa: N815  # CUDA's own name

    def __init__(self, machine: SimulatedMachine) -> None:
        self._functions: Mapping[str, Callable[..., Any]] = {
            "cudaGetErrorString": lambda code: _ERRORS.get(int(code), "unrecognized error code"),
            "cudaMemGetInfo": lambda device: machine.device(device).free_and_total,
            "cudaHostRegister": lambda ptr, size, flags: machine.pinned.register(ptr, size),
            "cudaHostUnregister": machine.pinned.unregister,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return self._functions.get(name, lambda *_: 0)


class _Ranges:
    """``torch._C._nvtx``: ranges for a profiler that is not there."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


_refuse_timeline = refusing(
    "the memory timeline of torch.profiler",
    "follows tensors by their addresses, which a simulated GPU does not have: run pytest "
    "--gpumem-device=dry, or take torch.cuda.memory._snapshot()",
)
"""Refusal of the profiler's timeline (csrc/profiler/data_flow.cpp)."""
