"""Threads that the code under test starts, which use the simulated GPU, too.

A dispatch mode belongs to one thread, so every other thread has to enter it, and state that CUDA
keeps by thread (the current device) is kept by thread here. Autograd's threads are not among
these: backward of ``meta`` tensors runs on the thread that called it.

Allocations by a thread of an earlier test are no part of the present test. While there is such a
thread, a GPU has two memories: that of the present test, and one for threads of earlier tests.

Replacements hold for all threads of the process, and a thread that compiles has to see torch's own
functions. So nothing is compiled while another thread of the simulation lives that has used torch.
The exception is the thread of a ``DataLoader`` that pins memory: it does so under the lock of
operators, which the compiling thread holds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from time import monotonic, sleep
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import pin_memory as loaders

from pytest_gpumem.simulated.common.callsite import refuse
from pytest_gpumem.simulated.common.patching import Patches, having
from pytest_gpumem.simulated.gpu.workspaces import Workspaces
from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.surface import compilers
from pytest_gpumem.values.errors import SimulationError

UNMEASURED = "code that is not measured"
"""Owner of threads that are started outside of tests."""


class Task(NamedTuple):
    """Work on a thread: a thread's own function, or a task of an executor."""

    name: str
    owner: str | None
    """The test that started it; ``None`` for a fixture that several tests share."""


class Threads:
    """The threads of one simulation, besides the one that began it."""

    def __init__(
        self, machine: SimulatedMachine, joining: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._machine = machine
        self._joining = joining
        """Enters the dispatch mode on one more thread."""
        self.owner: str | None = UNMEASURED
        """The owner of tasks that start now, see :class:`Task`."""
        self._tasks: dict[int, Task] = {}
        """By thread: the task that runs there."""
        self._leftovers: dict[int, Task] = {}
        """By thread: the task that an earlier test has started and that still runs."""
        self._failures: dict[threading.Thread, SimulationError] = {}
        """By thread: an error that its function ended with; raised where the thread is joined."""
        self.first = get_ident()
        """The thread that has entered the simulation first."""
        self.exclusive = Exclusive(machine.execution, lambda: (self.first, *self._tasks))

    def add_patches(self, patches: Patches) -> None:
        """Include every thread that starts from now on, and every task of an executor."""

        def start_thread(start: Any, thread: threading.Thread) -> None:
            # A worker of an executor outlives the simulation: it joins task by task.
            if getattr(thread, "_target", None) is not _worker:
                task = Task(thread.name, self._starter)
                thread.run = self._in_thread(thread.run, task)  # type: ignore[method-assign]  # once
                self._share()
            start(thread)

        def join_thread(join: Any, thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            failure = None if thread.is_alive() else self._failures.pop(thread, None)
            if failure is not None:
                raise failure

        def submit(submit: Any, executor: Any, /, *args: Any, **options: Any) -> Any:
            if not args:
                return submit(executor, *args, **options)
            self._share()
            function, *rest = args
            name = getattr(function, "__qualname__", type(function).__name__)
            task = Task(name, self._starter)
            return submit(executor, self._run, task, function, *rest, **options)

        patches.wrap(threading.Thread, "start", start_thread)
        patches.wrap(threading.Thread, "join", join_thread)
        patches.wrap(ThreadPoolExecutor, "submit", submit)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Include this thread in the simulation."""
        state = self._machine.thread_state
        if state.joined or not self._machine.is_active:
            yield
            return
        with ExitStack() as resources:
            resources.callback(torch._C._set_only_lift_cpu_tensors, False)
            torch._C._set_only_lift_cpu_tensors(True)
            resources.enter_context(self._joining())
            resources.callback(setattr, state, "joined", False)
            state.joined = True
            yield

    def _share(self) -> None:
        execution = self._machine.execution
        # Importing them later would restore names for other threads, too. A worker of
        # a DataLoader, whose queue has a thread, uses no GPU.
        if execution.lock is None and not execution.in_child:
            compilers.load()
        execution.share()
        execution.users.add(self.first)  # before, there was no other

    def _in_thread(self, run: Callable[[], None], task: Task) -> Callable[[], None]:
        def call() -> None:
            with self.joined(), self._running(task):
                try:
                    run()
                except SimulationError as error:
                    if get_ident() in self._leftovers:
                        return  # the test that would get the error is over
                    self._failures[threading.current_thread()] = error
                    self._machine.note(f"a thread of the test ended early: {error}")

        return call

    def raise_failures(self) -> None:
        """Raise the first error of a thread that was not joined."""
        failures = list(self._failures.values())
        self._failures.clear()
        if failures:
            raise failures[0]

    def _run(self, task: Task, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self.joined(), self._running(task):
            return function(*args, **options)

    @property
    def _starter(self) -> str | None:
        """The owner of threads that this one starts."""
        task = self._tasks.get(get_ident())
        return self.owner if task is None else task.owner

    def forget_failures(self) -> None:
        """Drop the errors of threads of an earlier test."""
        self._failures.clear()

    def begin(self, owner: str) -> None:
        """Begin the test ``owner``: tasks of earlier tests that still run are no part of it."""
        self.owner = owner
        for thread, task in list(self._tasks.items()):
            if task.owner is not None:
                self._leave_over(thread, task)

    def owned_by(self, owner: str | None) -> AbstractContextManager[None]:
        """Make ``owner`` the owner of tasks that start inside."""
        return having(self, "owner", owner)

    @contextmanager
    def _running(self, task: Task) -> Iterator[None]:
        thread = get_ident()
        outer = self._tasks.get(thread)
        self._tasks[thread] = task
        if task.owner not in (self.owner, None):
            self._leave_over(thread, task)
        try:
            yield
        finally:
            if outer is None:
                del self._tasks[thread]
            else:
                self._tasks[thread] = outer
            if thread in self._leftovers:
                del self._leftovers[thread]
                self._separate_memory()

    def _leave_over(self, thread: int, task: Task) -> None:
        self._leftovers[thread] = task
        self._separate_memory()

    def _separate_memory(self) -> None:
        """Give threads of earlier tests a second memory for as long as there are any."""
        for gpu in self._machine.gpus:
            if not self._leftovers:
                gpu.leftover_workspaces = None
            elif gpu.leftover_workspaces is None:
                # At no address of another GPU.
                memory = gpu.empty_memory(gpu.index + len(self._machine.gpus))
                gpu.leftover_workspaces = partial(self._if_left_over, gpu.workspaces_in(memory))

    def _if_left_over(self, workspaces: Workspaces) -> Workspaces | None:
        """Return ``workspaces`` to a thread of an earlier test, with a note."""
        task = self._leftovers.get(get_ident())
        if task is None:
            return None
        self._machine.note(
            f"{task.owner} left {task.name!r} running in a thread: what it allocates is not charged"
        )
        return workspaces


_LOADERS_LOOP = "_pin_memory_loop"


class Exclusive:
    """Exclusive use of torch by one thread.

    ``threads`` are those that take part in the simulation; operators run in ``execution``.
    """

    patience = 1.0
    """Seconds to wait for threads that have done their work to end."""

    def __init__(self, execution: Dispatch, threads: Callable[[], Collection[int]]) -> None:
        self._execution = execution
        self._threads = threads
        self._holder: int | None = None
        self.patches = Patches()
        """The replacement that stays while the others are undone."""

        def pin_memory(pin: Callable[..., Any], *args: Any, **options: Any) -> Any:
            with execution.lock or nullcontext():
                return pin(*args, **options)

        self.patches.wrap(loaders, "pin_memory", pin_memory)

    @property
    def is_mine(self) -> bool:
        """Whether this thread has exclusive use of torch."""
        return self._execution.lock is None or self._holder == get_ident()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold exclusive use inside; refuse if another thread lives."""
        lock = self._execution.lock
        if lock is None or self.is_mine:
            yield
            return
        if not self._is_alone():
            # Replacements hold for all threads.
            refuse(
                "torch.compile",
                "compiles while another thread lives that uses torch, which a simulated GPU "
                "cannot follow: run pytest --gpumem-device=dry, or --gpumem-sim-compile=eager",
            )
        with lock, having(self, "_holder", get_ident()):
            yield

    def _is_alone(self) -> bool:
        until = monotonic() + self.patience
        while monotonic() <= until:
            frames = sys._current_frames()
            others = (self._execution.users & frames.keys() & {*self._threads()}) - {get_ident()}
            if all(_is_loaders(frames[thread]) for thread in others):
                return True
            sleep(0.02)
        return False


def _is_loaders(frame: FrameType) -> bool:
    return any(each.f_code.co_name == _LOADERS_LOOP for each, _ in walk_stack(frame))
