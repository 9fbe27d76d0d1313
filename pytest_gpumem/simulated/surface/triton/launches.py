"""Launches of Triton's kernels: signature, binding, tuning and hooks are Triton's own.

A kernel is launched through a twin, which has the same attributes, and caches of its own: a real
GPU must not use code compiled and tuned here later in the process.
Source: triton/runtime/jit.py and autotuner.py, releases 3.2 to 3.9.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.operators.described import (
    DESCRIPTIONS,
    base_function,
    on_gpu,
    path_of,
)
from pytest_gpumem.simulated.surface.triton import driver
from pytest_gpumem.simulated.surface.triton.compiled import Compiled
from pytest_gpumem.simulated.surface.triton.stores import Stores

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine

Run = Callable[..., Any]

ARE_IN = "triton.runtime.jit"
"""A module of Triton itself, once that is imported: others may be called ``triton``, too."""

CLEARED_CACHE = 256 * 1024 * 1024
"""Bytes that ``triton.testing.do_bench`` clears before each run, so that the L2 cache holds nothing
(triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark)."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace Triton's launches, and its driver, once Triton is imported."""
    launches = _Launches(machine)
    for module, kind, method, launch in (
        (ARE_IN, "JITFunction", "run", launches.of_kernel),
        ("triton.runtime.autotuner", "Autotuner", "run", launches.of_tuner),
        ("triton.runtime.autotuner", "Heuristics", "run", launches.of_heuristics),
        ("triton.runtime.interpreter", "GridExecutor", "__call__", launches.of_interpreter),
    ):
        try:
            owner = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):  # another release of Triton
            continue
        patches.add(owner, method, launches.described(launch(getattr(owner, method))))
    driver.add_patches(machine, patches)


class _Launches:
    """Effects of a launch, by the kind of object that is launched."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._stores = Stores()
        self._twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def described(self, launch: Run) -> Run:
        """Wrap ``launch`` to run a kernel's description, where it has one."""

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            description = DESCRIPTIONS.kernels.get(base_function(kernel))
            if description is None:
                return launch(kernel, *args, **options)
            options.pop("grid", None)
            if options.pop("warmup", False):
                return None
            result = description(*args, **options)
            self._machine.kernel_wrote(args, options, result)
            return result

        return run

    def of_kernel(self, real: Run) -> Run:
        """Wrap ``JITFunction.run``: it compiles a stand-in, whose launch writes."""
        return lambda kernel, *args, **options: real(self._kernel(kernel), *args, **options)

    def of_heuristics(self, real: Run) -> Run:
        """Return ``Heuristics.run``, which calls functions for arguments, and launches."""
        return real

    def of_tuner(self, real: Run) -> Run:
        """``Autotuner.run``, which takes the first configuration that its pruning keeps."""

        def run(tuner: Any, *args: Any, **options: Any) -> Any:
            twin = self._tuner(tuner)
            result = real(twin, *args, **options)
            tuner.best_config = twin.best_config
            return result

        return run

    def of_interpreter(self, real: Run) -> Run:
        """``GridExecutor.__call__``: with ``TRITON_INTERPRET=1`` Triton computes on the CPU."""

        def run(executor: Any, *args: Any, **options: Any) -> Any:
            if not on_gpu(args, options):
                return real(executor, *args, **options)
            if not options.pop("warmup", False):
                self._machine.kernel_wrote(args, options)
            return None

        return run

    def _kernel(self, kernel: Any) -> Any:
        twin = self._twins.get(kernel)
        if twin is None:
            kind: Any = type(kernel)
            twin = self._twins[kernel] = _twin(kernel, _with_compiler(kind))
            twin.make_compiled = lambda *given: Compiled(self._machine, self._stores, twin, *given)
            if "device_caches" in vars(twin):
                twin.device_caches = defaultdict(twin.create_binder)
            else:  # 3.2
                twin.cache, twin.binder = defaultdict(dict), None
        return twin

    def _tuner(self, tuner: Any) -> Any:
        twin = self._twins.get(tuner)
        if twin is None:
            twin = self._twins[tuner] = _twin(tuner, type(tuner))
            twin.cache, twin.cache_results = {}, False

            def do_bench(call: Any, *args: Any, **options: Any) -> Sequence[float]:
                self._note_tuning(tuner)
                return [0.0, 0.0, 0.0]

            twin.do_bench = do_bench
        return twin

    def _note_tuning(self, tuner: Any) -> None:
        own = getattr(tuner, "_do_bench", None) is not None
        takes = (
            "what its own do_bench allocates is left out"
            if own
            else f"Triton's runs clear {CLEARED_CACHE >> 20} MiB of memory, which is left out"
        )
        self._machine.note(
            f"{path_of(base_function(tuner))} at {user_line()} was not tuned: it got its first "
            f"configuration; {takes}"
        )


def _twin(of: Any, kind: type[Any]) -> Any:
    twin: Any = object.__new__(kind)
    vars(twin).update(vars(of))
    return twin


@cache
def _with_compiler(kind: type) -> type:
    """Return a kernel class that compiles nothing; Triton sets its compiler at first use."""

    def made(kernel: Any) -> Run:
        def compile(source: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
            real = vars(kernel)["compile"]
            return kernel.make_compiled(
                lambda: real(source, target=target, options=options, **others)
            )

        return compile

    def remembered(kernel: Any, value: Run) -> None:
        vars(kernel)["compile"] = value

    return type(kind.__name__, (kind,), {"compile": property(made, remembered)})
