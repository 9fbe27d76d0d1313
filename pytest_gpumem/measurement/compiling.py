"""Allocations of torch while it compiles, kept out of the peaks of the test that compiles.

Inductor benchmarks kernels with copies of their arguments and a buffer that flushes the L2 cache,
and folds constants. It frees all of that before the first call continues. Dynamo reports when it
compiles a frame or a backward pass. Kernels with several configurations, also those of
``triton.autotune``, are benchmarked at their first launch. The capture of a CUDA graph does not
count as compiling: its pool belongs to the program.

Source: torch/_dynamo/callback.py and torch/_inductor/runtime/triton_heuristics.py, torch 2.6 to
2.15; triton/runtime/autotuner.py, releases 3.2 to 3.9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from pytest_gpumem.garbage import FramesCleared
from pytest_gpumem.measurement.phases import PhaseTracker
from pytest_gpumem.simulated.common.patching import Patches, patched_when_imported

CompileContext = Callable[[], AbstractContextManager[object]]
"""Function that returns a context manager around compilation."""

_CALLBACKS = "torch._dynamo.callback"
_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_TUNERS = {
    _HEURISTICS: (_HEURISTICS, "CachingAutotuner", "autotune_to_one_config"),
    "triton": ("triton.runtime.autotuner", "Autotuner", "_bench"),
}
"""Module, class and method that benchmarks a kernel; it is wrapped after the key's import.

A device replaces names of Triton after its whole import. A wrapper made earlier would, when the
test ends, restore the original over that replacement."""
_RECORDING = "CUDAGRAPH_RECORDING"


class Compiling:
    """A guard that keeps peaks during compilation out of the phases of ``tracker``.

    Torch compiles and benchmarks inside of ``context()``, if given. Then frames that compilers
    leave behind are cleared, too: their variables hold tensors of the test until the garbage
    collector runs, but only if the compiler did not find its results in a cache.
    """

    def __init__(self, tracker: PhaseTracker, context: CompileContext | None = None) -> None:
        self._tracker = tracker
        self._compile_context = context
        self._frames = FramesCleared()
        self._open = ExitStack()
        self._is_open = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Register callbacks for each compilation inside."""
        plans = {name: partial(self._wrap_tuner, *place) for name, place in _TUNERS.items()}
        # Importing them takes as long as importing torch, and only programs that compile need it.
        with patched_when_imported({_CALLBACKS: self._listen, **plans}):
            try:
                yield
            finally:
                self._end()

    def _listen(self, patches: Patches, callbacks: ModuleType) -> None:
        handler = callbacks.CompilationCallbackHandler
        patches.wrap(handler, "run_start_callbacks", self._run_start_callbacks)
        patches.wrap(handler, "run_end_callbacks", self._run_end_callbacks)

    def _run_start_callbacks(self, run: Callable[..., Any], handler: Any, *args: Any) -> None:
        run(handler, *args)
        if not any(each.callback_trigger.name == _RECORDING for each in args):
            self._begin()
            if self._compile_context is not None:
                self._frames.begin()

    def _run_end_callbacks(self, run: Callable[..., Any], *args: Any) -> None:
        self._end()
        run(*args)
        if self._compile_context is not None:
            self._frames.end()

    def _wrap_tuner(
        self, module: str, kind: str, method: str, patches: Patches, _: ModuleType
    ) -> None:
        tuner = getattr(sys.modules.get(module), kind, None)
        if hasattr(tuner, method):  # missing in other releases of Triton
            patches.wrap(tuner, method, self._measure)

    def _measure(self, measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._is_open:
            return measure(*args, **options)
        self._begin()
        try:
            return measure(*args, **options)
        finally:
            self._end()

    def _begin(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._open.enter_context(self._tracker.compiling())
            if self._compile_context is not None:
                self._open.enter_context(self._compile_context())

    def _end(self) -> None:
        self._is_open = False
        self._open.close()
