"""Rank and world size of a process, and the environment that states them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError
from pytest_gpumem.values.world import WorldError, world_of


@pytest.mark.parametrize(
    ("size", "rank", "per_machine", "local"),
    [
        (8, 0, None, (0, 8)),
        (8, 7, None, (7, 8)),
        (64, 9, None, (1, 8)),
        (12, 7, None, (1, 6)),  # two machines of six: torchrun starts as many in each
        (11, 4, None, (0, 1)),
        (64, 9, 4, (1, 4)),
    ],
)
def test_ranks_fill_equal_machines(
    size: int, rank: int, per_machine: int | None, local: tuple[int, int]
) -> None:
    world = world_of(size, rank, per_machine=per_machine)
    assert (world.local_rank, world.local_size) == local


@pytest.mark.parametrize(
    ("size", "rank", "per_machine", "sentence"),
    [
        (0, 0, None, "0 is not a number of ranks; write an int from 1 to 1,048,576"),
        (True, 0, None, "True is not a number of ranks"),
        (8, 8, None, "8 is not a rank of 8; write an int from 0 to 7"),
        (8, -1, None, "-1 is not a rank of 8"),
        (12, 0, 8, "12 ranks do not fill machines of 8 GPUs; write a multiple of 8"),
    ],
)
def test_an_impossible_world_is_refused(
    size: Any, rank: Any, per_machine: int | None, sentence: str
) -> None:
    with pytest.raises(WorldError) as error:
        world_of(size, rank, per_machine=per_machine)
    assert str(error.value).startswith(sentence)


def test_a_rank_without_a_world_size_is_refused() -> None:
    with pytest.raises(WorldError, match="rank=3 needs world_size="), simulate("T4", rank=3):
        pass


def test_the_environment_is_that_of_torchrun() -> None:
    before = dict(os.environ)
    with simulate("H100", world_size=64, rank=9):
        told = {name: os.environ[name] for name in os.environ.keys() - before.keys()}
        assert torch.cuda.device_count() == 8
        assert torch.cuda.current_device() == 1
    assert os.environ == before
    assert told["RANK"] == "9"
    assert told["LOCAL_RANK"] == "1"
    assert told["GROUP_RANK"] == "1"
    assert told["WORLD_SIZE"] == "64"
    assert told["LOCAL_WORLD_SIZE"] == "8"
    assert told["MASTER_ADDR"] == "127.0.0.1"
    assert told["TORCHELASTIC_RUN_ID"] == "simulated"


def test_a_machine_has_as_many_ranks_as_gpus() -> None:
    with simulate("A100-80GB*4", world_size=8, rank=6) as gpu:
        assert os.environ["LOCAL_WORLD_SIZE"] == "4"
        torch.zeros(1000, device="cuda")
        assert gpu is gpu.devices[2]
        assert gpu.peak_allocated == 4096


def test_the_default_group_exists_inside_the_simulation_alone() -> None:
    with simulate("H100", world_size=8, rank=3):
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        group = dist.new_group([2, 3])
        assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 2)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_the_code_may_initialise_the_default_group(backend: str | None) -> None:
    with simulate("H100", world_size=8, rank=3):
        dist.init_process_group(backend, init_method="tcp://elsewhere:1", world_size=8, rank=3)
        assert dist.get_backend() == (backend or "undefined")
        assert dist.get_rank() == 3
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group(backend)
        dist.destroy_process_group()
        dist.init_process_group(backend)
        coordinate = init_device_mesh("cuda", (2, 4)).get_coordinate()
        assert coordinate is not None
        assert list(coordinate) == [0, 3]


def test_groups_from_before_the_simulation_are_restored(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        outer = dist.group.WORLD
        with simulate("H100", world_size=8):
            assert dist.get_world_size() == 8
        assert dist.group.WORLD is outer
        assert dist.get_world_size() == 1
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_two_simulations_may_have_different_worlds() -> None:
    for size in (2, 4):
        with simulate("H100", world_size=size) as gpu:
            mesh = init_device_mesh("cuda", (size,))
            shard: Any = dist.tensor.distribute_tensor(
                torch.zeros(1 << 20, device="cuda"), mesh, [dist.tensor.Shard(0)]
            )
            assert shard.to_local().numel() == (1 << 20) // size
            assert (shard + 1).full_tensor().numel() == 1 << 20
            assert shard.device == torch.device("cuda:0")
            del shard
        assert gpu.allocated == 0


@pytest.mark.parametrize(
    "use", [lambda: DeviceMesh("cuda", [0, 1]), lambda: dist.init_process_group("nccl")]
)
def test_a_refusal_for_want_of_ranks_names_the_marker(use: Any) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError) as error:
        use()
    place = f"{os.path.relpath(__file__)}:"
    assert str(error.value).startswith(f'torch.distributed.init_process_group("nccl") at {place}')
    assert "@pytest.mark.gpumem(ranks=8)" in str(error.value)
    assert "world_size=8, rank=0" in str(error.value)


def test_meshes_are_made_by_splitting_where_the_device_is_given() -> None:
    with simulate("H100", world_size=8, rank=3):
        dist.init_process_group("nccl", device_id=torch.device("cuda:3"))
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [0, 1, 2, 3]
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [3, 7]
        dist.barrier(device_ids=[3])


def test_a_monitored_barrier_returns_at_once() -> None:
    with simulate("H100", world_size=8):
        dist.init_process_group("gloo")
        dist.monitored_barrier()
