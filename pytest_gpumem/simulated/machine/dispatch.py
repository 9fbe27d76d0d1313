"""The table of operators' handlers, and the lock that they run under."""

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
        """Whether this is a ``multiprocessing`` worker, and not a test that runs forked."""
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
    """The device that the Python call under way requests, where torch gets ``meta`` instead.

    If it is ``None``, a request of ``meta`` comes from C++, and repeats a tensor's device.
    """
    on_meta = False
    """Whether the last operator was on meta tensors of the user's own."""
    number: torch.Tensor | None = None
    """A number that C++ has put on ``meta`` or on the GPU: the next operator shows on which."""
    sets_items = False
    """Whether the thread runs ``x[i] = ...``, whose numbers stay on the host."""
    reads_item = False
    """Whether the thread runs ``item()`` of Python, which can return a placeholder."""
    joined = False
    """Whether the thread has entered the simulation."""
    pool: Any = None
    """The pool of the innermost ``torch.cuda.MemPoolContext``."""
