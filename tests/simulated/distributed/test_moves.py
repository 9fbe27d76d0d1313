"""Sharded parameters that move between devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gpumem import simulate


def test_moving_a_sharded_module_to_its_own_device_keeps_it() -> None:
    # nn.Module.to passes None for the type and then whether to block.
    with simulate("A100-40GB", alloc_conf="", world_size=4) as gpu:
        model = nn.Linear(1024, 1024, bias=False)
        fully_shard(model)
        shard = model.weight
        assert model.to("cuda").weight is shard
        assert shard.to("cuda", None, False).dtype == torch.float32
        assert shard.to("cuda", torch.bfloat16, False).dtype == torch.bfloat16
        assert gpu.allocated == 1024 * 1024 * 4 // 4
