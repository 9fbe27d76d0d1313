"""The process group of a test on several GPUs: that of the ranks that have been started.

As in a simulated rank ``torch.distributed`` is initialised, and code that initialises it itself has
a group of its own instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from pytest_gpumem.values.world import World


class OwnGroup:
    """The default group of this process, where the code under test has none; it uses ``store``.

    NCCL for tensors on GPUs, gloo for others; only gloo where torch has no NCCL.
    """

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world = store, world
        self._count = 0
        self._is_there = False
        self._init = c10d.init_process_group
        self._patches = pytest.MonkeyPatch()
        for owner in (dist, c10d):
            self._patches.setattr(owner, "init_process_group", self._giving_way)

    def ensure(self) -> None:
        """Initialise ``torch.distributed`` unless done; all ranks do it at the same time."""
        if dist.is_initialized():
            return
        self._count += 1
        self._init(
            "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo",
            store=PrefixStore(f"group/{self._count}", self._store),
            rank=self._world.rank,
            world_size=self._world.size,
        )
        self._is_there = True

    def close(self) -> None:
        """Leave the group, if it is the process's own."""
        self._patches.undo()
        self._give_way()

    def _give_way(self) -> None:
        if self._is_there and dist.is_initialized():
            dist.destroy_process_group()
        self._is_there = False

    def _giving_way(self, *args: Any, **kwargs: Any) -> Any:
        self._give_way()
        return self._init(*args, **kwargs)
