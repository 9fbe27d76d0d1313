"""Allocations of torch while it compiles, kept out of the peaks of the test that compiles.

Inductor measures kernels on copies of their arguments and beside a buffer that empties the cache,
and folds constants. It frees all of that before the first call continues. Dynamo reports when it
compiles a frame or a backward pass; kernels with several configurations are measured when they are
first launched. The recording of a CUDA graph is no compiling: its pool belongs to the program.

Source: torch/_dynamo/callback.py and torch/_inductor/runtime/triton_heuristics.py, torch 2.6 to
2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from pytest_gpumem.measurement.phases import PhaseTracker

_CALLBACKS = "torch._dynamo.callback"
_KERNELS = "torch._inductor.runtime.triton_heuristics"
_RECORDING = "CUDAGRAPH_RECORDING"


class Compiling:
    """A guard that keeps peaks during compilation out of the phases of ``tracker``."""

    def __init__(self, tracker: PhaseTracker) -> None:
        self._tracker = tracker
        self._open = ExitStack()
        self._is_open = False
        self._patches = pytest.MonkeyPatch()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Register callbacks for each compilation inside."""
        with pytest.MonkeyPatch.context() as self._patches:
            if _CALLBACKS in sys.modules:
                self._listen()
            else:  # its import takes as long as torch's, and only programs that compile need it
                self._patches.setattr(torch, "compile", self._first(torch.compile))
            try:
                yield
            finally:
                self._end()

    def _first(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile)
        def call(*args: Any, **options: Any) -> Any:
            compiled = compile(*args, **options)
            # A decorator with options compiles nothing yet.
            if torch.compile is call and _CALLBACKS in sys.modules:
                torch.compile = compile
                self._listen()
            return compiled

        return call

    def _listen(self) -> None:
        handler = sys.modules[_CALLBACKS].CompilationCallbackHandler
        starts, ends = handler.run_start_callbacks, handler.run_end_callbacks

        def run_start_callbacks(handler: Any, *args: Any) -> None:
            starts(handler, *args)
            if not any(each.callback_trigger.name == _RECORDING for each in args):
                self._begin()

        def run_end_callbacks(handler: Any, *args: Any) -> None:
            self._end()
            ends(handler, *args)
            self._hear_of_kernels()

        self._patches.setattr(handler, "run_start_callbacks", run_start_callbacks)
        self._patches.setattr(handler, "run_end_callbacks", run_end_callbacks)
        self._hear_of_kernels()

    def _hear_of_kernels(self) -> None:
        tuner = getattr(sys.modules.get(_KERNELS), "CachingAutotuner", None)
        measure = getattr(tuner, "autotune_to_one_config", None)
        if measure is None or getattr(measure, "__wrapped__", None) is not None:
            return

        @functools.wraps(measure)
        def autotune_to_one_config(*args: Any, **options: Any) -> Any:
            if self._is_open:
                return measure(*args, **options)
            self._begin()
            try:
                return measure(*args, **options)
            finally:
                self._end()

        self._patches.setattr(tuner, "autotune_to_one_config", autotune_to_one_config)

    def _begin(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._open.enter_context(self._tracker.compiling())

    def _end(self) -> None:
        self._is_open = False
        self._open.close()
