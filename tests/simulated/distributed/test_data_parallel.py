"""DistributedDataParallel on one rank: its reducer in C++ allocates on the simulated GPU.

Source: torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem import simulate

MIB = 1 << 20
LAYERS, WEIGHT = 8, 4 * MIB
WEIGHTS = LAYERS * WEIGHT
WORKSPACES = 2 * (32 * MIB)
"""Of cuBLAS on an H100: the thread of forward has one, and so has that of backward."""


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)]).cuda()


def step(parallel: nn.Module) -> None:
    parallel(torch.randn(4, 1024, device="cuda")).sum().backward()


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        # A bucket for all gradients, and the gradients themselves.
        ({}, 2 * WEIGHTS),
        ({"static_graph": True}, 2 * WEIGHTS + 512),
        # ... and a number for each parameter that says whether it was used.
        ({"find_unused_parameters": True}, 2 * WEIGHTS + 512),
        # Gradients are views of the bucket.
        ({"gradient_as_bucket_view": True}, WEIGHTS),
    ],
)
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
def test_buckets_take_as_much_as_gradients(options: dict[str, Any], gradients: int) -> None:
    with simulate("H100", world_size=8) as gpu:
        parallel = DistributedDataParallel(model(), **options)
        for _ in range(3):
            step(parallel)
            assert gpu.allocated == WEIGHTS + gradients + WORKSPACES
        parallel.zero_grad()
        held = WEIGHTS if options.get("gradient_as_bucket_view") else gradients - WEIGHTS
        assert gpu.allocated == WEIGHTS + held + WORKSPACES


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({"bucket_cap_mb": 10}, [2, 3, 3]),
        # By default 1 MiB for the first one (_DEFAULT_FIRST_BUCKET_BYTES) and 25 MiB for others.
        ({}, [7, 1]),
    ],
)
def test_buckets_are_allocated_one_by_one(options: dict[str, Any], buckets: list[int]) -> None:
    with simulate("H100", world_size=8) as gpu:
        made = model()
        before = len(gpu.trace)
        kept = DistributedDataParallel(made, find_unused_parameters=True, **options)
        large = [event.size for event in gpu.trace[before:] if event.action == "alloc"]
    # Filled up in the order of the parameters and allocated in the reverse one, behind the tensor
    # by which _broadcast_coalesced sends all parameters.
    assert [size // WEIGHT for size in large if size >= MIB] == [LAYERS, *buckets]
    assert kept is not None


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    with simulate("H100", world_size=8):
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).cuda()
        layers.forward = lambda x: layers[0](x)
        parallel = DistributedDataParallel(layers, find_unused_parameters=True)
        parallel(torch.randn(4, 8, device="cuda")).sum().backward()
        assert [layer.weight.grad is None for layer in layers] == [False, True]


def test_no_sync_reduces_nothing() -> None:
    with simulate("H100", world_size=8) as gpu:
        parallel = DistributedDataParallel(model())
        step(parallel)
        held = gpu.allocated
        with parallel.no_sync():
            step(parallel)
        assert gpu.allocated == held


def test_a_hook_that_compresses_takes_half_a_bucket() -> None:
    peaks = {}
    for name in ("allreduce_hook", "bf16_compress_hook"):
        with simulate("H100", world_size=8) as gpu:
            parallel = DistributedDataParallel(model(), gradient_as_bucket_view=True)
            parallel.register_comm_hook(None, getattr(default_hooks, name))
            step(parallel)
        peaks[name] = gpu.peak_allocated
    # buffer.to(bfloat16), when most saved tensors are freed: 16 KiB of each layer.
    more = peaks["bf16_compress_hook"] - peaks["allreduce_hook"]
    assert WEIGHTS // 2 - LAYERS * 32 * 1024 < more <= WEIGHTS // 2


def test_a_compressed_bucket_is_freed_after_the_host_has_waited() -> None:
    # The callback runs on a stream of the pool, on which the sent half of the bucket is used.
    with simulate("H100", world_size=8) as gpu:
        parallel = DistributedDataParallel(model(), gradient_as_bucket_view=True)
        parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
        step(parallel)
        before = len(gpu.trace)
        torch.cuda.synchronize()
        kept = torch.ones(1, device="cuda")  # the allocator asks for events when it is called
        done = [event.size for event in gpu.trace[before:] if event.action == "free_completed"]
        assert sum(done) == WEIGHTS // 2
        assert kept.is_cuda


def test_unsynchronised_buffers_and_several_groups() -> None:
    with simulate("H100", world_size=8, rank=5) as gpu:
        group = dist.new_group([4, 5, 6, 7])
        net = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)).cuda()
        step(DistributedDataParallel(net, process_group=group, device_ids=[5]))
        assert gpu.allocated > WEIGHT


def test_shapes_are_compared_on_the_gpu_of_the_rank() -> None:
    with simulate("T4*2", world_size=2, rank=1) as gpu:
        net = torch.nn.Linear(4, 5).cuda()
        DistributedDataParallel(net, device_ids=[1])
        first, own = gpu.devices
        assert (first.peak_allocated, own is gpu) == (0, True)
        # Weight, bias, and shapes.
        sizes = [one.size for one in own.trace if one.action == "alloc"]
        assert sizes[:5] == [80, 20, 8, 8, 8]
