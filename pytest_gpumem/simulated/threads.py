"""Threads that the code under test starts: they use the simulated GPU too.

What torch calls a mode belongs to one thread, so every other thread has to enter it, and what a
GPU's own driver keeps apart per thread (the current device) is kept apart here. Autograd's threads
are not among them: backward of ``meta`` tensors runs on the thread that called it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.thread import _worker
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.errors import SimulationError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


class ThreadState(threading.local):
    """What each thread has of its own."""

    current_index = 0
    """The current device, as ``cudaGetDevice`` says."""
    destination: torch.device | None = None
    """The device that the running call asked for in Python, where torch is told ``meta``.

    Without it ``meta`` comes from C++, which repeats what a tensor says of itself.
    """
    on_meta = False
    """Whether the last operator was on meta tensors of the user's own."""
    joined = False
    """Whether the thread has entered the simulation."""


class Threads:
    """The threads of one simulation beside the one that began it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._failures: dict[threading.Thread, SimulationError] = {}
        """By thread: what it could not run; raised again where somebody joins it."""

    def plan(self, patches: Patches) -> None:
        """Take along every thread that starts from here on, and every task of an executor."""
        patches.plan(threading.Thread, "start", self._start(threading.Thread.start))
        patches.plan(threading.Thread, "join", self._join(threading.Thread.join))
        patches.plan(ThreadPoolExecutor, "submit", self._submit(ThreadPoolExecutor.submit))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be part of the simulation on this thread."""
        state = self._simulation.here
        if state.joined or not self._simulation.is_active:
            yield
            return
        with ExitStack() as resources:
            resources.callback(torch._C._set_only_lift_cpu_tensors, False)
            torch._C._set_only_lift_cpu_tensors(True)
            resources.enter_context(self._simulation.autocast.reachable_here())
            resources.enter_context(self._simulation.execution)
            resources.callback(setattr, state, "joined", False)
            state.joined = True
            yield

    def _start(self, start: Callable[[threading.Thread], None]) -> Callable[..., None]:
        def call(thread: threading.Thread) -> None:
            # A worker of an executor outlives the simulation: it joins task by task.
            if getattr(thread, "_target", None) is not _worker:
                thread.run = self._in_thread(thread.run)  # type: ignore[method-assign]  # once
                self._simulation.execution.share()
            start(thread)

        return call

    def _in_thread(self, run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                with self.joined():
                    run()
            except SimulationError as error:
                self._failures[threading.current_thread()] = error
                self._simulation.note(f"a thread of the test ended early: {error}")

        return call

    def _join(self, join: Callable[..., None]) -> Callable[..., None]:
        def call(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            failure = None if thread.is_alive() else self._failures.pop(thread, None)
            if failure is not None:
                raise failure

        return call

    def raise_failures(self) -> None:
        """Raise what a thread that nobody joined could not run."""
        failures = list(self._failures.values())
        self._failures.clear()
        if failures:
            raise failures[0]

    def forget_failures(self) -> None:
        """Drop what threads of an earlier test could not run."""
        self._failures.clear()

    def _submit(self, submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        def call(
            executor: ThreadPoolExecutor,
            function: Callable[..., Any],
            /,
            *args: Any,
            **options: Any,
        ) -> Future[Any]:
            self._simulation.execution.share()
            return submit(executor, self._task, function, *args, **options)

        return call

    def _task(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self.joined():
            return function(*args, **options)
