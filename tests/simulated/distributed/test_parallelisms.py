"""Pipelines, tensor and context parallel, other shardings, frameworks: unmodified on one rank."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

MIB = 1 << 20
WORKSPACES = 2 * 32 * MIB
OLD = torch.__version__.startswith("2.6.")


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])


def step(parallel: nn.Module) -> None:
    parallel(torch.randn(2, 1024, device="cuda")).sum().backward()


def pipeline(rank: int, ranks: int, microbatches: int) -> int:
    """Return the peak of a 1F1B training step above weights and workspaces, in bytes."""
    with simulate("H100", world_size=ranks, rank=rank) as gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # Activations of 8 MiB for each microbatch that is under way.
        module = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()).to(device)
        x = torch.randn(1024, 1024, device=device, requires_grad=rank > 0)
        y = torch.randn(1024, 1024, device=device, requires_grad=True)
        stage = PipelineStage(module, rank, ranks, device, input_args=(x,), output_args=(y,))
        schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda out, goal: (out - goal).sum())
        batch = torch.randn(1024 * microbatches, 1024, device=device)
        before = gpu.allocated
        torch.cuda.reset_peak_memory_stats()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch if rank == ranks - 1 else None)
        return torch.cuda.max_memory_allocated() - before - WORKSPACES


@pytest.mark.skipif(OLD, reason="every stage keeps its outputs until the next step")
def test_stages_of_a_pipeline_have_their_own_peaks() -> None:
    # 4 MiB for an activation. Buffers to receive eight of them are made before the first one, and
    # as many for gradients. The last stage returns its outputs, of each microbatch and as one.
    # Since 2.15 each buffer is made when it is received, and goes with what is made of it
    # (torch/distributed/pipelining/_recv_buffers.py).
    expected = (60, 96, 100) if torch.__version__ < "2.15" else (28, 44, 84)
    assert tuple(pipeline(rank, 4, 8) // MIB for rank in (0, 1, 3)) == expected


def looped(rank: int, ranks: int, known: bool) -> int:
    """Return the peak of a step under an interleaved schedule with two stages a rank."""
    with simulate("H100", world_size=ranks, rank=rank) as gpu:
        device = torch.device("cuda", rank)
        stages = []
        for place in (rank, rank + ranks):
            module = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).to(device)
            x = torch.randn(8, 256, device=device, requires_grad=place > 0)
            y = torch.randn(8, 256, device=device, requires_grad=True)
            given: Any = {"input_args": (x,), "output_args": (y,)} if known else {}
            stages.append(PipelineStage(module, place, 2 * ranks, device, **given))
        schedule = ScheduleInterleaved1F1B(
            cast(Any, stages), 8, loss_fn=lambda out, goal: (out - goal).sum()
        )
        batch = torch.randn(64, 256, device=device)
        schedule.step(*[batch] * (rank == 0), target=batch if rank == ranks - 1 else None)
        return gpu.peak_allocated


@pytest.mark.skipif(torch.__version__ < "2.13", reason="stages infer gradients since torch 2.13")
def test_stages_that_infer_shapes_have_the_same_peak() -> None:
    # The second stage of the first rank receives what its first one sends.
    assert looped(0, 4, known=False) == looped(0, 4, known=True)
    with pytest.raises(UnknownValueError, match="a pipeline's stage needs its input_args"):
        looped(1, 4, known=False)


def test_tensor_parallel_keeps_a_part_of_each_weight() -> None:
    with simulate("H100", world_size=8) as gpu:
        module = nn.Sequential(
            nn.Linear(1024, 4096, bias=False), nn.GELU(), nn.Linear(4096, 1024, bias=False)
        ).cuda()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        mesh = init_device_mesh("cuda", (8,))
        parallelize_module(module, mesh, plan)
        assert gpu.allocated == 2 * 16 * MIB // 8
        step(module)
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.step()
        # Gradients and two averages of the same size; steps are counted on the host.
        assert gpu.allocated == 4 * (2 * 16 * MIB // 8) + WORKSPACES


def test_trunc_normal_initialises_a_shard() -> None:
    with simulate("H100", world_size=8):
        mesh = init_device_mesh("cuda", (8,))
        part: Any = distribute_tensor(torch.zeros(64, 64, device="cuda"), mesh, [Shard(0)])
        nn.init.trunc_normal_(part)
        assert part.to_local().shape == (8, 64)


def test_context_parallel_attends_to_parts_of_a_sequence() -> None:
    from torch.distributed.tensor.experimental import context_parallel

    with simulate("H100", world_size=8) as gpu:
        mesh = init_device_mesh("cuda", (8,))
        q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with context_parallel(mesh, buffers=[q.detach()], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad is not None
        assert gpu.peak_allocated > q.nbytes


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fully_sharded_data_parallel_keeps_shards(strategy: str) -> None:
    with simulate("H100", world_size=8) as gpu:
        parallel = FullyShardedDataParallel(
            layers().cuda(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=ShardingStrategy[strategy],
        )
        assert gpu.allocated == 4 * 4 * MIB // 8
        step(parallel)
        torch.cuda.synchronize()
        assert gpu.allocated == 2 * (4 * 4 * MIB // 8) + WORKSPACES


def test_offloaded_parameters_are_on_the_host() -> None:
    with simulate("H100", world_size=8) as gpu:
        offload = CPUOffload(offload_params=True)
        parallel = FullyShardedDataParallel(layers().cuda(), cpu_offload=offload)
        assert gpu.allocated == 0
        step(parallel)
        (flat,) = parallel.parameters()
        assert flat.grad is not None
        assert (flat.device.type, flat.grad.device.type) == ("cpu", "cpu")
        assert flat.nbytes == flat.grad.nbytes == 4 * 4 * MIB // 8
        assert gpu.allocated == WORKSPACES
        # Unsharded parameters and gradients, one weight each at least.
        assert gpu.peak_allocated > 2 * 4 * MIB + WORKSPACES


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_zero_redundancy_optimizer_shards_its_state() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with simulate("H100", world_size=4) as gpu:
        parallel = DistributedDataParallel(layers().cuda())
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=0.1)
        step(parallel)
        before = gpu.allocated
        optimizer.step()
        # The two averages of one weight of four.
        assert gpu.allocated - before == 2 * 4 * MIB


def test_accelerate_finds_its_ranks() -> None:
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    with simulate("H100", world_size=8) as gpu:
        try:
            accelerator: Any = accelerate.Accelerator()
            assert accelerator.num_processes == 8
            model, optimizer = accelerator.prepare(*_with_optimizer(layers()))
            assert isinstance(model, DistributedDataParallel)
            accelerator.backward(model(torch.randn(2, 1024, device="cuda")).sum())
            optimizer.step()
            # Weights, buckets, gradients, two averages.
            assert gpu.allocated == 5 * 4 * 4 * MIB + WORKSPACES
        finally:
            state.AcceleratorState._reset_state(True)
    assert not dist.is_initialized()


def _with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters())
