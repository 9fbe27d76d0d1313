import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.gpumem(ranks=8)
def test_rank():
    torch.zeros(8, device="cuda")


@pytest.mark.gpumem(ranks=2)
def test_collectives():
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(2000, device="cuda"), x)


@pytest.mark.gpumem(ranks=2)
def test_replicated():
    model = DistributedDataParallel(nn.Linear(64, 64).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpumem(ranks=4)
def test_sharded():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.randn(8, 64, device="cuda")).sum().backward()
