"""Purposes of the memory that sharding and data parallelism allocate."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun

MIB = 1 << 20


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)]).cuda()


def step(parallel: nn.Module) -> None:
    parallel(torch.randn(2, 1024, device="cuda")).sum().backward()


def purposes(gpu: SimulatedRun) -> Counter[tuple[str, str, int]]:
    """Return names, kinds and KiB of the allocations with a purpose, from 256 KiB."""
    origins = ((event.context, event.size) for event in gpu.trace if event.action == "alloc")
    return Counter(
        (origin.operator_name, origin.kind, size // 1024)
        for origin, size in origins
        if origin is not None and origin.purpose is not None and size >= MIB // 4
    )


def test_allocations_of_fully_shard_are_named_by_module() -> None:
    with simulate("H100", world_size=8) as gpu:
        layers = model()
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
        step(layers)
    # Gathered for forward and, but for the last one, which was still there, for backward again.
    found = purposes(gpu)
    assert found["unsharded parameters", "unsharded", 4096] in (3, 4)
    assert found["all-gather of 0", "buffer", 4096] == 2
    # A gradient of four MiB to be reduced, and the rank's part of it.
    assert found["reduce-scatter of 0", "buffer", 4096] == 1
    assert found["reduce-scatter of 1", "buffer", 512] == 1


def test_allocations_of_fully_sharded_data_parallel_have_a_purpose() -> None:
    with simulate("H100", world_size=8) as gpu:
        step(FullyShardedDataParallel(model()))
    names = {name for name, *_ in purposes(gpu)}
    assert names == {"unsharded parameters", "reduce-scatter"}


def test_half_precision_shards_have_a_purpose() -> None:
    half = MixedPrecision(param_dtype=torch.bfloat16)
    with simulate("H100", world_size=8) as gpu:
        step(FullyShardedDataParallel(model(), mixed_precision=half))
    # Two weights of two MiB each, of which this rank casts an eighth.
    assert purposes(gpu)["shards to gather", "unsharded", 512] >= 1


def test_buckets_of_data_parallel_have_a_purpose() -> None:
    with simulate("H100", world_size=8) as gpu:
        step(DistributedDataParallel(model()))
    # One bucket for both layers, and before it the buffer that broadcasts all parameters.
    assert set(purposes(gpu)) == {("gradient buckets", "buffer", 8192)}
