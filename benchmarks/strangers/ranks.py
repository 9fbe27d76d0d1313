"""One rank of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strangers import Program, ranked
from strangers.regimes import Model, step, tokens


def _steps(model: Any, optimizer: Any = None, count: int = 3) -> None:
    chosen = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(count):
        step(model, chosen, tokens())


def _sharded(**settings: Any) -> Model:
    from torch.distributed.fsdp import fully_shard

    model = Model().cuda()
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def sharded() -> None:
    _steps(_sharded())


def sharded_in_bfloat16() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _steps(_sharded(mp_policy=policy))


def sharded_and_kept() -> None:
    _steps(_sharded(reshard_after_forward=False))


def sharded_and_checkpointed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = Model()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    model.cuda()
    for block in model.blocks:
        fully_shard(block)
    _steps(fully_shard(model))


def sharded_in_two_directions() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "parts"))
    _steps(_sharded(mesh=mesh))


def sharded_with_clipped_gradients() -> None:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        given = tokens()
        F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def replicated() -> None:
    _steps(nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[0]))


def replicated_with_buckets_as_views() -> None:
    _steps(
        nn.parallel.DistributedDataParallel(
            Model().cuda(), device_ids=[0], gradient_as_bucket_view=True, bucket_cap_mb=1
        )
    )


def replicated_and_compressed() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[0])
    model.register_comm_hook(None, bf16_compress_hook)
    _steps(model)


def replicated_with_gradients_of_low_rank() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[0])
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _steps(model, count=4)


def replicated_and_accumulated() -> None:
    model = nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for last in (False, True):
            given = tokens(2)
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(given[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_in_parts() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[0])
    _steps(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def tensors_in_parts() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128))
            for _ in range(2)
        )
    ).cuda()
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 128, device="cuda")).square().mean().backward()
        optimizer.step()


def collectives() -> None:
    from torch import distributed

    given = torch.randn(1024, 64, device="cuda")
    parts = [torch.empty_like(given) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, given)
    one = torch.empty(1024 // distributed.get_world_size(), 64, device="cuda")
    distributed.reduce_scatter_tensor(one, given)
    distributed.all_to_all_single(torch.empty_like(given), given)
    distributed.all_reduce(given)
    distributed.broadcast(given, 0)


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    yield from ranked(
        sharded, sharded_and_kept, sharded_and_checkpointed, sharded_in_two_directions,
        sharded_with_clipped_gradients, replicated, replicated_with_buckets_as_views,
        replicated_and_accumulated, state_in_parts, of=4,
    )  # fmt: skip
    yield from ranked(
        sharded_in_bfloat16, replicated_and_compressed, replicated_with_gradients_of_low_rank,
        of=4, ways=("f32",),
    )  # fmt: skip
    yield from ranked(tensors_in_parts, collectives, of=2)
