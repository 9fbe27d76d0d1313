"""The table of operators' handlers, as far as the machine and the layers above need it."""

from __future__ import annotations

import multiprocessing
import threading
from threading import RLock, get_ident
from typing import Any

import torch

from pytest_gpumem.simulated.machine.signatures import Handler as Handler
from pytest_gpumem.simulated.machine.storages import Storages


class Dispatch:
    """Handlers by operator, the lock that they run under, and whether a kernel runs just now."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._handlers: dict[Any, Handler] = {}
        self.inside = False
        """Whether a meta kernel runs: tensors then report the device they really have."""
        self.lock: RLock | None = None
        """The lock held while an operator runs, once the code under test has started a thread."""
        self._owner_thread = 0
        self.users: set[int] = set()
        """Threads that ran an operator since the code under test has started one."""
        self._was_forked = False

    def bind(self, func: Any, handler: Handler) -> None:
        """Run ``func`` by ``handler``, whatever kind of operator it is."""
        self._handlers[func] = handler

    def share(self) -> None:
        """Allow several threads to run operators, one at a time."""
        if self.lock is None:
            self.lock = self._storages.lock = RLock()
            self._owner_thread = get_ident()

    def forked(self) -> None:
        """Remove the GPU in a forked process, where locks of other threads would stay locked."""
        self._was_forked = True
        self.lock = self._storages.lock = None
        self._handlers = {}

    @property
    def in_child(self) -> bool:
        """Whether this is a worker, forked off the process that simulates; a test may be, too."""
        return self._was_forked and multiprocessing.parent_process() is not None

    @property
    def inside_here(self) -> bool:
        """Whether the kernel that runs was called from this thread."""
        return self.inside and (self.lock is None or self._owner_thread == get_ident())


class ThreadState(threading.local):
    """The state of one thread."""

    current_index = 0
    """The current device, as ``cudaGetDevice`` returns it."""
    destination: torch.device | None = None
    """The device that the running call named in Python, where torch gets ``meta``.

    Without it ``meta`` comes from C++, which repeats the device that a tensor reports.
    """
    on_meta = False
    """Whether the last operator was on meta tensors of the user's own."""
    sets_items = False
    """Whether the thread runs ``x[i] = ...``, whose numbers stay on the host."""
    reads_item = False
    """Whether the thread runs ``item()`` of Python, whose result can show that it is unknown."""
    joined = False
    """Whether the thread has entered the simulation."""
    pool: Any = None
    """The pool of the innermost ``torch.cuda.MemPoolContext``."""
