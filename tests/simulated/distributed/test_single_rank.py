"""A world of one rank, which the code under test initialises itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import init_process_group as imported_before
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:FutureWarning", "ignore:barrier.*using the device:UserWarning"
)

MIB = 1 << 20
BACKENDS = ["nccl", "gloo", None, "cpu:gloo,cuda:nccl"]


def begin(backend: str | None, folder: Path, **options: Any) -> None:
    address = f"file://{folder / 'meeting'}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_parallel_trains_on_one_rank(backend: str | None, tmp_path: Path) -> None:
    with simulate("H100") as gpu:
        begin(backend, tmp_path)
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        model = nn.Linear(1024, 1024, bias=False).cuda()
        parallel = DistributedDataParallel(model, device_ids=[0])
        parallel(torch.randn(4, 1024, device="cuda")).sum().backward()
        # The weight, its gradient and a bucket of 4 MiB each, and cuBLAS's workspaces.
        assert gpu.allocated == 3 * 4 * MIB + 2 * 32 * MIB
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert gpu.notes == ()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_collectives_give_the_only_rank_what_it_sends(device: str, tmp_path: Path) -> None:
    with simulate("T4") as gpu:
        begin("cpu:gloo,cuda:nccl", tmp_path)
        sent = torch.arange(4.0, device=device)
        collectives: list[Any] = [
            dist.all_gather_into_tensor,
            dist.reduce_scatter_tensor,
            dist.all_to_all_single,
            lambda received, sent: dist.all_gather([received], sent),
            lambda received, sent: dist.reduce_scatter(received, [sent]),
            lambda received, sent: dist.scatter(received, [sent]),
        ]
        for collective in collectives:
            received = torch.zeros(4, device=device)
            collective(received, sent)
            assert received.tolist() == [0, 1, 2, 3]
        dist.all_reduce(sent)
        dist.broadcast(sent, 0)
        assert sent.tolist() == [0, 1, 2, 3]
        known: list[Any] = [None]
        dist.all_gather_object(known, {"rank": 0})
        assert known == [{"rank": 0}]
    assert gpu.notes == ()


@pytest.mark.parametrize(
    ("version", "is_copied"), [("2.10", False), ("2.11", True), ("2.14", True), ("2.15", False)]
)
def test_some_releases_scatter_to_the_only_rank_without_a_factor(
    version: str, is_copied: bool, tmp_path: Path
) -> None:
    """CUDA builds of 2.11 and 2.13 on the dry device copy; that of 2.15 calls NCCL."""
    half: Any = vars(_distributed_c10d)["_make_nccl_premul_sum"](0.5)
    with simulate("T4", torch_version=version):
        begin("nccl", tmp_path)
        received = torch.zeros(4, device="cuda")
        dist.reduce_scatter_tensor(received, torch.ones(4, device="cuda"), half)
        if is_copied:
            assert received.tolist() == [1] * 4
        else:
            with pytest.raises(UnknownValueError):
                received.tolist()


def test_variables_may_give_rank_and_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun with one process sets these; a function imported before is patched too."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with simulate("T4"):
        imported_before("nccl", init_method=f"file://{tmp_path / 'a'}?rank=0&world_size=1")
        assert dist.get_backend() == "nccl"
        one = torch.ones(2, device="cuda")
        dist.all_reduce(one)
        assert one.tolist() == [1, 1]


def test_a_group_belongs_to_its_simulation(tmp_path: Path) -> None:
    with simulate("T4"):
        begin("nccl", tmp_path)
        with simulate("T4"):
            assert not dist.is_initialized()
        assert dist.is_initialized()
        dist.barrier()
    assert not dist.is_initialized()


@pytest.mark.parametrize("init", [dist.init_process_group, imported_before])
@pytest.mark.parametrize("backend", ["nccl", None])
def test_a_group_of_two_ranks_is_refused(init: Any, backend: str | None, tmp_path: Path) -> None:
    store = HashStore()
    sentence = r'init_process_group\("nccl"\) at .* is for several ranks'
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match=sentence):
        init(backend, store=store, rank=0, world_size=2)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.__version__ < "2.15", reason="NCCL has one class before 2.15")
@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_every_nccl_backend_is_a_fake_group(backend: str) -> None:
    if backend != "nccl" and not torch.backends.cuda.is_built():
        pytest.skip("registered in builds with CUDA alone")
    with simulate("T4", world_size=4, rank=1):
        dist.init_process_group(backend)
        part = dist.new_group([0, 1])
        one = torch.ones(2, device="cuda")
        dist.all_reduce(one, group=part)
        assert one.tolist() == [2, 2]
        assert dist.get_world_size(part) == 2
