"""One rank of several: shards and replicas."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn


def net() -> nn.Sequential:
    return nn.Sequential(
        *[nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(3)]
    )


def learn(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 32, 128, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpumem(ranks=4)
def test_fsdp2() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("nccl")
    model = net().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    learn(model)
    distributed.destroy_process_group()


@pytest.mark.gpumem(ranks=4)
def test_ddp() -> None:
    distributed.init_process_group("nccl")
    learn(nn.parallel.DistributedDataParallel(net().cuda(), device_ids=[0]))
    distributed.destroy_process_group()
