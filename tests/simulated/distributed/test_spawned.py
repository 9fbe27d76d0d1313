"""``torch.multiprocessing.spawn`` on one rank: the rank's own function runs here."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

MIB = 1 << 20
mp: Any = torch.multiprocessing


def train(rank: int, world_size: int, seen: list[Any]) -> None:
    """Train as in the tutorial of DistributedDataParallel."""
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.Linear(1024, 1024, bias=False).to(rank)
    parallel = DistributedDataParallel(model, device_ids=[rank])
    parallel(torch.randn(2, 1024, device=rank)).sum().backward()
    seen += [rank, dist.get_world_size(), torch.cuda.max_memory_allocated()]


def test_the_ranks_function_runs_in_this_process() -> None:
    with simulate("H100", world_size=4, rank=3) as gpu:
        group = dist.group.WORLD
        for _ in range(2):
            seen: list[Any] = []
            mp.spawn(train, args=(4, seen), nprocs=4)
            assert seen == [3, 4, gpu.peak_allocated]
            # The process has ended: only cuBLAS's workspaces of two threads stay allocated.
            assert gpu.allocated == 2 * 32 * MIB
        assert dist.group.WORLD is group


def test_the_index_of_spawn_is_the_local_rank() -> None:
    with simulate("H100*8", world_size=64, rank=21):
        seen: list[Any] = []
        context: Any = mp.start_processes(
            lambda index: seen.extend([index, os.environ["RANK"]]),
            nprocs=torch.cuda.device_count(),
            join=False,
        )
        assert context.join()
        assert seen == [21 % 8, "21"]
        refusal = r"^3 processes .* rank 21 of 64: spawn 8, as many as there are GPUs"
        with pytest.raises(UnsupportedOperatorError, match=refusal):
            mp.spawn(train, nprocs=3)


def test_errors_of_the_function_are_raised_unchanged() -> None:
    def fail(index: int) -> None:
        raise KeyError(index)

    with simulate("H100", world_size=2):
        with pytest.raises(KeyError):
            mp.spawn(fail, nprocs=2)
        mp.spawn(lambda index: sys.exit(0), nprocs=2)
        with pytest.raises(mp.ProcessExitedException, match="exit code 3"):
            mp.spawn(lambda index: sys.exit(3), nprocs=2)
