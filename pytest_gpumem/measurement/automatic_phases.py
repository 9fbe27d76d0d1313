"""Phases that are found automatically: forward, backward and step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import pytest
import torch
from torch._guards import TracingContext
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_gpumem.measurement.observer import MemoryObserver
from pytest_gpumem.measurement.phases import Phase, PhaseTracker
from pytest_gpumem.simulated.common.patching import wrapped

FORWARD = "forward"
BACKWARD = "backward"
STEP = "step"

_BACKWARD_ENTRIES = (torch.autograd, torch.autograd.graph)
"""The modules that hold ``_engine_run_backward``: ``backward()`` finds it in the first."""


@dataclass
class _Step:
    """An optimizer step that has begun; torch reports its end only if it succeeds."""

    phase: Phase | None
    frame: FrameType | None
    """The frame that runs the step; ``None`` once it has ended. The step's closure, an argument of
    that frame, refers to this object: such a cycle would keep the frame and the step's loss."""
    thread: int

    @property
    def is_over(self) -> bool:
        """Whether the step was left by an exception, so that its end was not reported."""
        if get_ident() != self.thread:
            return False
        running: FrameType | None = sys._getframe()
        while running is not None and running is not self.frame:
            running = running.f_back
        return running is None


class AutomaticPhases:
    """The automatic phases of a body: each is an outermost call, with all calls inside it.

    Automatic phases never nest: a module that checkpointing runs again during backward belongs to
    backward. A step with a closure, as in Lightning's loop, is interrupted while the closure runs:
    the forward and backward in the closure are separate phases.
    """

    def __init__(self, tracker: PhaseTracker, observer: MemoryObserver | None = None) -> None:
        self._tracker = tracker
        self._observer = observer
        self._busy = False
        self._step: _Step | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find phases while the body runs inside."""
        before = register_optimizer_step_pre_hook(self._step_begins)
        after = register_optimizer_step_post_hook(self._step_ended)
        try:
            with pytest.MonkeyPatch.context() as patches:
                forward = self._calling(torch.nn.Module.__call__)
                if self._observer is not None:
                    forward = self._observer.calling(forward)
                    builtins = torch.jit._builtins._get_builtin_table()
                    for owner, name, observed in self._observer.wrappers():
                        function = getattr(owner, name)
                        wrapper: Any = wrapped(function, observed)
                        if name == "__new__":
                            wrapper = staticmethod(wrapper)
                        patches.setattr(owner, name, wrapper)
                        # TorchScript finds the operator of a function by the function's identity.
                        if operator := builtins.get(id(function)):
                            patches.setitem(builtins, id(wrapper), operator)
                patches.setattr(torch.nn.Module, "__call__", forward)
                for place in _BACKWARD_ENTRIES:
                    run = wrapped(place._engine_run_backward, self._run_backward)
                    if self._observer is not None:
                        run = wrapped(run, self._observer.run_backward)
                    patches.setattr(place, "_engine_run_backward", run)
                yield
        finally:
            before.remove()
            after.remove()
            self._close_step()

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``call``, ``Module.__call__``: the outermost call is a phase.

        A profiler with ``with_stack=True`` records each frame with the code of ``Module.__call__``
        as the call of a module, which is its local variable ``self`` (``recordPyCall`` of
        torch/csrc/autograd/profiler_python.cpp, torch 2.6 to 2.15).
        """
        phases, is_compiling = self, torch.compiler.is_compiling

        @functools.wraps(call)
        def called(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # Nested modules call this, too, some thousand times a step: it must be fast.
            if is_compiling():  # a phase would become part of the graph, or break it
                return call(self, *args, **kwargs)
            if phases._busy and (phases._step is None or not phases._abandoned_step()):
                return call(self, *args, **kwargs)
            return phases._run(FORWARD, call, (self, *args), kwargs)

        return called

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        within = self._busy and (self._step is None or not self._abandoned_step())
        # Compilers trace gradients, too; up to torch 2.12 they do not say so by ``is_compiling``.
        if within or torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            return run(*args, **kwargs)
        return self._run(BACKWARD, run, args, kwargs)

    def _run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._busy = True
        try:
            with self._tracker.window(name):
                return function(*args, **kwargs)
        finally:
            self._busy = False

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._busy and not self._abandoned_step():
            return None
        self._busy = True
        if self._observer is not None:
            self._observer.begin(STEP)
        step = self._step = _Step(self._tracker.enter(STEP), sys._getframe(1), get_ident())
        # A pre-hook of torch replaces the step's arguments by its result, here for a closure.
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._wrapped_closure(step, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._wrapped_closure(step, kwargs["closure"])}
        return None

    def _wrapped_closure(self, step: _Step, closure: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if step is not self._step or step.phase is None:
                return closure(*args, **kwargs)
            self._step, self._busy = None, False
            if self._observer is not None:
                self._observer.end()
            try:
                with self._tracker.interrupted(step.phase):
                    return closure(*args, **kwargs)
            finally:
                self._close_step()  # a nested step that an exception has ended
                self._step, self._busy = step, True
                if self._observer is not None:
                    self._observer.begin(STEP)

        return watched

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step is not None and self._step.frame is sys._getframe(1):
            if self._observer is not None:
                self._observer.stepped(optimizer)
            self._close_step()

    def _abandoned_step(self) -> bool:
        if self._step is None or not self._step.is_over:
            return False
        self._close_step()
        return True

    def _close_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._busy, step.frame = False, None
        if self._observer is not None:
            self._observer.end()
        if step.phase is not None:
            self._tracker.leave(step.phase)
