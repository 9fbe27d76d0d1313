"""Triton on a simulated GPU: everything around a kernel runs, and the kernel itself does nothing.

A kernel allocates nothing: the Python code around it does. So the allocations are exact without any
description. The tensors that a kernel may write to have unknown values from then on, and nothing
is compiled: code that asks for compiled kernels needs the dry device.

Source: triton/runtime/jit.py, autotuner.py and driver.py, triton/backends/nvidia/driver.py,
releases 3.2 to 3.9.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.custom_kernels import (
    DESCRIPTIONS,
    base_function,
    on_gpu,
    path_of,
)
from pytest_gpumem.simulated.operators.triton_stores import Stores
from pytest_gpumem.simulated.surface.cuda import properties_of
from pytest_gpumem.values.errors import UnsupportedOperatorError

RunKernel = Callable[..., Any]

ARE_IN = "triton.runtime.jit"
"""A module that only Triton itself has: other modules may be called ``triton``, too."""

CLEARED_CACHE = 256 * 1024 * 1024
"""Bytes that ``triton.testing.do_bench`` clears before each run, so that the L2 cache holds nothing
(triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark)."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace Triton's launches, timings and driver, once Triton is imported."""
    for module, kind, method, replacement in (
        (ARE_IN, "JITFunction", "run", _launched),
        ("triton.runtime.autotuner", "Autotuner", "run", _tuned),
        ("triton.runtime.autotuner", "Autotuner", "_bench", _untimed),
        ("triton.runtime.autotuner", "Heuristics", "run", _described),
        ("triton.runtime.interpreter", "GridExecutor", "__call__", _interpreted),
    ):
        try:
            owner = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):  # another release of Triton
            continue
        patches.add(owner, method, replacement(machine, getattr(owner, method)))
    backends = importlib.import_module("triton.backends").backends
    driver = importlib.import_module("triton.runtime.driver").driver
    # Up to 3.4 an attribute, since then a property that creates a missing driver.
    name = "active" if "active" in vars(driver) else "_active"
    patches.add(driver, name, _driver(backends["nvidia"].driver, machine))


def _described(machine: SimulatedMachine, launch: RunKernel) -> RunKernel:
    """Wrap ``launch`` to run a kernel's description instead, if it has one."""

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        description = DESCRIPTIONS.kernels.get(base_function(kernel))
        if description is None:
            return launch(kernel, *args, **options)
        options.pop("grid", None)
        if options.pop("warmup", False):
            return None
        result = description(*args, **options)
        machine.kernel_wrote(args, options, result)
        return result

    return run


def _launched(machine: SimulatedMachine, _: RunKernel) -> RunKernel:
    """Return a launch that only marks the tensors that the kernel stores to as unknown.

    It raises ``ValueError`` for a tensor of the CPU, with the text of Triton's launcher.
    """
    stores = Stores()

    def is_out_of_reach(tensor: torch.Tensor) -> bool:
        if machine.storages.of(tensor) is not None:
            return False
        on_host = machine.storages.is_unknown_on_cpu(tensor) or not raw.is_meta(tensor)
        return on_host and not tensor.is_pinned()

    def run(kernel: Any, *args: Any, warmup: bool = False, **options: Any) -> None:
        name = path_of(base_function(kernel))
        if warmup:
            _refuse(f"compiles the Triton kernel {name}")
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        for at, value in enumerate(given.values()):
            if any(map(is_out_of_reach, _memory_of(value))):
                raise ValueError(
                    f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)"
                )
        written = stores.of(kernel)
        machine.kernel_wrote(*_memory_of([given[name] for name in given.keys() & written]))
        values = machine.values
        if values.everything and values.uncomputed is None:
            values.uncomputed = f"the Triton kernel {name}"

    return _described(machine, run)


def _tuned(machine: SimulatedMachine, real: RunKernel) -> RunKernel:
    """Wrap ``Autotuner.run``, so that no real GPU uses a configuration that was chosen here."""

    def run(tuner: Any, *args: Any, **options: Any) -> Any:
        kept = {name: vars(tuner)[name] for name in ("cache", "cache_results") & vars(tuner).keys()}
        vars(tuner).update(cache={}, cache_results=False)
        try:
            return real(tuner, *args, **options)
        finally:
            vars(tuner).update(kept)

    return _described(machine, run)


def _untimed(machine: SimulatedMachine, _: RunKernel) -> RunKernel:
    """Return a benchmark by which the tuner's first configuration is the best."""

    def _bench(tuner: Any, *_: Any, **__: Any) -> Sequence[float]:
        own = getattr(tuner, "_do_bench", None) is not None
        left_out = (
            "what its own do_bench allocates is left out"
            if own
            else f"Triton's runs clear {CLEARED_CACHE >> 20} MiB of memory, which is left out"
        )
        machine.note(
            f"{path_of(base_function(tuner))} at {user_line()} was not tuned: it got its first "
            f"configuration; {left_out}"
        )
        return [0.0, 0.0, 0.0]

    return _bench


def _interpreted(machine: SimulatedMachine, real: RunKernel) -> RunKernel:
    """Wrap the interpreter: with ``TRITON_INTERPRET=1`` Triton computes on the CPU."""

    def run(executor: Any, *args: Any, **options: Any) -> Any:
        if not on_gpu(args, options):
            return real(executor, *args, **options)
        if not options.pop("warmup", False):
            machine.kernel_wrote(args, options)
        return None

    return _described(machine, run)


def _memory_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument: itself, or those in a descriptor or reinterpretation."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _memory_of(item)
    else:
        base = None if isinstance(value, torch.Tensor) else getattr(value, "base", None)
        yield from raw.tensors_in(value if base is None else base)


def _refuse(what: str) -> NoReturn:
    raise UnsupportedOperatorError(
        f"{user_line()} {what}, which no simulated GPU does: run pytest --gpumem-device=dry"
    )


def is_driver(owner: Any, name: str, value: Any) -> bool:
    """Return whether a replacement is the driver, by which Inductor finds the GPU of kernels."""
    return name in ("active", "_active")


def _driver(kind: type, machine: SimulatedMachine) -> Any:
    """Return Triton's own driver for CUDA, with other queries of the device."""

    def __init__(self: Any) -> None:  # noqa: N807  # of the class below
        self.utils = _Utils(machine)
        # Looked up when they are called: a simulation replaces them when it begins.
        self.get_device_capability = lambda *of: torch.cuda.get_device_capability(*of)
        self.get_current_stream = lambda index=None: torch.cuda.current_stream(index).cuda_stream
        self.get_current_device = lambda: torch.cuda.current_device()
        self.set_current_device = lambda index: torch.cuda.set_device(index)

    return type("SimulatedDriver", (kind,), {"__init__": __init__})()


class _Properties(dict[str, int]):
    """The driver's properties of a device, but for its clocks."""

    def __missing__(self, name: str) -> NoReturn:
        _refuse(f"asks Triton's driver for {name}")


class _Utils:
    """The driver functions that Triton compiles: ``triton.runtime.driver.active.utils``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def get_device_properties(self, index: int) -> dict[str, int]:
        """Return shared memory (bytes), registers, multiprocessors and threads of a warp."""
        properties = properties_of(self._machine.device(index))
        return _Properties(
            max_shared_mem=properties.shared_memory_per_block_optin,
            max_num_regs=properties.regs_per_multiprocessor,
            multiprocessor_count=properties.multi_processor_count,
            warpSize=properties.warp_size,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"asks for {name} of Triton's driver")
