"""Private pools: their numbers, and the active one of each thread."""

from __future__ import annotations

import threading
from typing import Protocol

from pytest_gpumem.allocator.blocks import PoolId


class PoolIds:
    """Numbers of private pools: (0, n) for users' pools, (n, 0) for graphs' own."""

    def __init__(self) -> None:
        self._users = self._graphs = 0

    def of_user(self) -> PoolId:
        """Return a new id for a pool object or handle."""
        self._users += 1
        return 0, self._users

    def of_graph(self) -> PoolId:
        """Return a new id for a graph that shares no pool."""
        self._graphs += 1
        return self._graphs, 0


class Pool(Protocol):
    """A pool that user code has made."""

    id: PoolId


class ActivePool(threading.local):
    """The pool of the innermost ``torch.cuda.MemPoolContext`` of each thread."""

    pool: Pool | None = None
