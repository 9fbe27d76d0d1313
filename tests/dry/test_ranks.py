"""One rank of several alone in its process: torch's own process groups, beside simulated ones."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.dry.conftest import Run, bare_environment, why_not

TESTS = """
import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def ending(body):
    @functools.wraps(body)
    def test():
        try:
            body()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return test


def device():
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own


def joined():
    own = device()
    dist.init_process_group("nccl")
    return own


def network(own):
    def block():
        return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

    return nn.Sequential(*[block() for _ in range(4)]).to(own)


def train(model, own, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(32, 512, device=own)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)


@pytest.mark.gpumem(ranks=8)
@ending
def test_fully_shard():
    own = device()
    dist.init_process_group("nccl", device_id=own)
    model = network(own)
    shard(model)
    train(model, own)


@pytest.mark.gpumem(ranks=8)
@ending
def test_flat_shards():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    own = joined()
    # Shards in half precision and whole parameters wait for streams that have used them.
    model = FullyShardedDataParallel(
        network(own),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=own,
    )
    train(model, own)


@pytest.mark.gpumem(ranks=8, rank=3)
@ending
def test_another_rank():
    own = joined()
    assert dist.get_rank() == 3
    model = network(own)
    shard(model)
    train(model, own)


@pytest.mark.gpumem(ranks=8)
@ending
def test_hybrid():
    own = device()
    model = network(own)
    shard(model, mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")))
    train(model, own)


@pytest.mark.gpumem(ranks=8)
@ending
def test_data_parallel():
    own = joined()
    wrapped = nn.parallel.DistributedDataParallel(network(own), device_ids=[own.index])
    train(wrapped, own, steps=3)


@pytest.mark.gpumem(ranks=8)
@ending
def test_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    own = joined()
    wrapped = nn.parallel.DistributedDataParallel(network(own), device_ids=[own.index])
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, own, steps=4)


def replicated(model, own, **options):
    wrapped = nn.parallel.DistributedDataParallel(model.to(own), device_ids=[own.index], **options)
    for _ in range(2):
        wrapped(torch.randn(32, 64, device=own)).sum().backward()


@pytest.mark.gpumem(ranks=4)
@ending
def test_norms_of_all_ranks():
    # How many elements each rank has is compared.
    replicated(nn.Sequential(nn.SyncBatchNorm(64), nn.Linear(64, 64)), joined())


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


@pytest.mark.gpumem(ranks=4)
@ending
def test_unused():
    # Whether any rank has used a parameter is asked for.
    replicated(Unused(), joined(), find_unused_parameters=True)


@pytest.mark.gpumem(ranks=4)
@ending
def test_tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    own = device()
    mesh = init_device_mesh("cuda", (4,))
    model = network(own)
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, own)


@pytest.mark.gpumem(ranks=2, rank=1)
@ending
def test_point_to_point():
    own = joined()
    received = torch.empty(1000, 1000, device=own)
    dist.recv(received, 0)
    sent = received * 2
    dist.send(sent, 0)
    operations = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@pytest.mark.gpumem(ranks=4)
@ending
def test_collectives():
    own = joined()
    data = torch.randn(1024, 256, device=own)
    dist.all_to_all_single(torch.empty_like(data), data)
    parts = [torch.empty(256, 256, device=own) for _ in range(4)]
    dist.all_to_all(parts, list(data.chunk(4)))
    dist.all_gather([torch.empty_like(data) for _ in range(4)], data)
    dist.reduce_scatter(torch.empty(256, 256, device=own), parts)
    dist.all_reduce(data)
    dist.broadcast(data, 0)


@pytest.mark.gpumem(ranks=4)
@ending
def test_functional():
    import torch.distributed._functional_collectives as functional

    own = joined()
    data = torch.randn(1024, 256, device=own)
    gathered = functional.all_gather_tensor(data, 0, dist.group.WORLD)
    reduced = functional.all_reduce(gathered, "sum", dist.group.WORLD)
    (functional.reduce_scatter_tensor(reduced, "sum", 0, dist.group.WORLD) + 1).sum()


@pytest.mark.gpumem(ranks=4, rank="worst")
@ending
def test_worst():
    own = joined()
    torch.empty(1024 * (1 + dist.get_rank()), 1024, device=own)


@pytest.mark.gpumem(ranks=1)
@ending
def test_only_rank():
    # Its GPU is there, so that it gets a process, with torch's variables for one rank.
    own = joined()
    dist.all_reduce(torch.ones(1024, device=own))


@pytest.mark.gpumem(ranks=4)
@pytest.mark.parametrize("number", range(2))
def test_any_backend(number):
    own = device()
    dist.init_process_group()
    dist.all_reduce(torch.ones(1024, device=own))


@pytest.mark.gpumem
def test_alone():
    assert "RANK" not in os.environ
    assert not dist.is_initialized()
    torch.empty(100, device="cuda")
"""

NUMBERS = ("peak_allocated", "peak_reserved")
UNTIL_WATCHED = pytest.mark.skipif(
    int(version("torch").split(".")[1]) < 15,
    reason="NCCL's watchdog frees what a hook has sent: by time",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By kind of device and by name: the tests above, as the report has them."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "test_ranks.py").write_text(TESTS, encoding="utf-8")
    return {kind: _reported(folder, kind) for kind in ("dry", "sim")}


def _reported(folder: Path, kind: str) -> dict[str, Any]:
    report = folder / f"{kind}.json"
    options = ["-p", "no:randomly", "-W", "ignore", f"--gpumem-device={kind}:H100"]
    # A simulated device needs a torch that imports without NVIDIA's packages.
    starter = ["-m", "pytest_gpumem.dry"] if kind == "sim" else []
    done = subprocess.run(
        [sys.executable, *starter, "-m", "pytest", *options, f"--gpumem-report=json:{report}"],
        cwd=folder,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    tests = json.loads(report.read_text())["tests"]
    return {test["nodeid"].partition("::")[2]: test for test in tests}


@pytest.mark.parametrize(
    "name",
    [
        *("fully_shard", "another_rank", "hybrid", "data_parallel", "tensor_parallel"),
        *(
            pytest.param("hook", marks=UNTIL_WATCHED),
            "flat_shards",
            "norms_of_all_ranks",
            "unused",
            "point_to_point",
            "collectives",
            "functional",
            "worst",
            "only_rank",
            "any_backend[0]",
            "any_backend[1]",
            "alone",
        ),
    ],
)
def test_a_rank_takes_what_a_simulated_one_takes(found: Any, name: str) -> None:
    dry, simulated = (found[kind][f"test_{name}"]["measurement"] for kind in ("dry", "sim"))

    assert dry["peak_allocated"] > 0
    assert [dry[each] for each in NUMBERS] == [simulated[each] for each in NUMBERS]


def test_the_worst_rank_is_judged(found: Any) -> None:
    worst = found["dry"]["test_worst"]

    # The last of four has four times the first one's 4 MiB.
    assert worst["measurement"]["peak_allocated"] == 16 * 1024 * 1024
    assert worst["environment"]["ranks"] == "worst rank of 4"


def test_no_other_rank_has_failed(dry_run: Run) -> None:
    found = dry_run(
        """
from torch.distributed import PrefixStore
from pytest_gpumem.dry.ranks import SingleProcessStore

own = SingleProcessStore()
store = PrefixStore("default_pg", own)
# kStoreDumpKey of ProcessGroupNCCL.hpp, which NCCL's monitor reads each second.
found["exists"] = [store.check([key]) for key in ("id of rank 1", "exception_dump")]
"""
    )

    assert found["exists"] == [True, False]
