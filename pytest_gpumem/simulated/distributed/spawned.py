"""``torch.multiprocessing.spawn``: of the processes that it would start, only the rank's own runs.

Its function runs in this process, with the index that it would have in that process, and leaves no
process group behind. An error is raised as it is.

Source: torch/multiprocessing/spawn.py (``start_processes``), torch 2.6 to 2.13.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.distributed.process_groups import Membership
from pytest_gpumem.values.errors import UnsupportedOperatorError
from pytest_gpumem.values.world import World


def add_patches(world: World, patches: Patches) -> None:
    """Replace ``spawn`` and ``start_processes``, which start no process."""

    def start_processes(
        fn: Callable[..., object],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> Any:
        index = _index(world, nprocs)
        with Membership(world).for_good():
            try:
                fn(index, *args)
            except SystemExit as left:
                if left.code:
                    raise ProcessExitedException(
                        f"process {index} terminated with exit code {left.code}",
                        error_index=index,
                        error_pid=os.getpid(),
                        exit_code=left.code if isinstance(left.code, int) else 1,
                    ) from left
        return None if join else ProcessContext([], [])

    for owner in (mp, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            patches.add(owner, name, start_processes)


def _index(world: World, count: int) -> int:
    if count == world.size:
        return world.rank
    if count == world.local_size:
        return world.local_rank
    raise UnsupportedOperatorError(
        f"{count} processes are spawned at {user_line()}, one of which would be rank {world.rank} "
        f"of {world.size}: spawn {world.local_size}, as many as there are GPUs "
        "(torch.cuda.device_count())"
    )
