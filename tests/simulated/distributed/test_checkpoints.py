"""Distributed checkpoints and full state dictionaries, saved and loaded by one rank of eight.

Source: torch/distributed/checkpoint, torch/distributed/_state_dict_utils.py and
torch/distributed/fsdp/_optim_utils.py, torch 2.13.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

MIB = 1 << 20
LAYERS, WEIGHT, RANKS = 2, 4 * MIB, 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage"),
    pytest.mark.filterwarnings("ignore:.*FSDP.state_dict_type"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered"),
]


@pytest.fixture
def gpu() -> Iterator[SimulatedRun]:
    with simulate("H100", world_size=RANKS, rank=3) as run:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        yield run


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)]).cuda()


def trained(parallel: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(torch.randn(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    gc.collect()  # cycles of hooks and graphs would be freed at any time
    return parallel, optimizer


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return trained(model)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    model_state, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": model_state, "optimizer": state}


def test_a_rank_saves_and_loads_its_shards(gpu: SimulatedRun, tmp_path: Path) -> None:
    model, optimizer = sharded()
    saved = states(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    before = gpu.allocated
    state_dict_saver.save({**saved, "step": 7}, checkpoint_id=tmp_path)
    loaded = {**saved, "step": 0}
    state_dict_loader.load(loaded, checkpoint_id=tmp_path)
    # Shards are copied to the host one by one, and loaded into their own memory.
    assert torch.cuda.max_memory_allocated() == before == gpu.allocated
    assert loaded["step"] == 7
    assert (tmp_path / ".metadata").is_file()
    assert any("the distributed checkpoint at" in note for note in gpu.notes)


@pytest.mark.parametrize("cached", [False, True])
def test_staging_for_an_asynchronous_save_takes_the_hosts_memory(
    gpu: SimulatedRun, tmp_path: Path, cached: bool
) -> None:
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    if not hasattr(staging, "DefaultStager"):
        pytest.skip("came with torch 2.9")
    stager = staging.BlockingAsyncStager(True) if cached else staging.DefaultStager()
    saved = states(*sharded())
    before = gpu.allocated
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        response: Any = state_dict_saver.async_save(
            saved, checkpoint_id=tmp_path / str(step), async_stager=stager
        )
        getattr(response, "upload_completion", response).result()
    assert torch.cuda.max_memory_allocated() == before


def test_an_async_save_by_another_process_is_refused(gpu: SimulatedRun, tmp_path: Path) -> None:
    if not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        pytest.skip("came with torch 2.7")
    process = state_dict_saver.AsyncCheckpointerType.PROCESS
    with pytest.raises(UnsupportedOperatorError, match="hands a checkpoint to another process"):
        state_dict_saver.async_save(
            states(*sharded()), checkpoint_id=tmp_path, async_checkpointer_type=process
        )


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="collectives that nobody waits for keep nothing before torch 2.8, and do so here",
)
def test_a_full_state_dict_is_gathered(gpu: SimulatedRun) -> None:
    model, optimizer = sharded()
    before = gpu.allocated
    whole = states(model, optimizer, full_state_dict=True)
    # The weight and two averages of each layer.
    assert gpu.allocated - before == 3 * LAYERS * WEIGHT
    del whole
    torch.cuda.reset_peak_memory_stats()
    on_host = states(model, optimizer, full_state_dict=True, cpu_offload=True)
    assert on_host["model"] == {}  # rank 0 has it
    assert torch.cuda.max_memory_allocated() - before == WEIGHT


def test_a_full_state_dict_is_broadcast_from_rank_0(gpu: SimulatedRun) -> None:
    model, optimizer = sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    before = gpu.allocated
    torch.cuda.reset_peak_memory_stats()
    set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={}, options=options)
    # Tensors are received whole, and the rank keeps its part.
    assert torch.cuda.max_memory_allocated() - before >= WEIGHT
    # Until torch 2.7 the averages are views of the received tensor.
    is_view = torch.__version__.startswith("2.6.")
    assert gpu.allocated - before == (2 * LAYERS * (WEIGHT - WEIGHT // RANKS) if is_view else 0)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_states_of_fully_sharded_data_parallel(
    gpu: SimulatedRun, tmp_path: Path, kind: str, original: bool
) -> None:
    # Of both layers' 8 MiB in one, the fourth of eight ranks has a part of the first alone.
    model, optimizer = trained(FullyShardedDataParallel(layers(), use_orig_params=original))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        state = model.state_dict()
        optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        assert set(optimizer_state["state"]) == {"0.weight", "1.weight"}
        assert {str(value.device) for value in state.values()} == {"cuda:3"}
        model.load_state_dict(state)
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optimizer_state)
        )
        if kind == "SHARDED_STATE_DICT":
            state_dict_saver.save({"model": state}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("original", [True, False])
def test_a_local_state_dict_is_refused(gpu: SimulatedRun, original: bool) -> None:
    model = FullyShardedDataParallel(layers(), use_orig_params=original)
    kind = StateDictType.LOCAL_STATE_DICT
    with (
        FullyShardedDataParallel.state_dict_type(model, kind),
        pytest.raises(UnknownValueError, match=r"shards at .*test_checkpoints\.py:.*lie"),
    ):
        model.state_dict()


def test_gradients_of_shards_are_kept_while_parameters_are_full() -> None:
    with simulate("H100", world_size=RANKS, rank=0) as gpu:
        model = FullyShardedDataParallel(layers())
        model(torch.randn(2, 1024, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        before = gpu.allocated
        with FullyShardedDataParallel.summon_full_params(model, rank0_only=True, writeback=False):
            pass
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ):
            assert {str(value.device) for value in model.state_dict().values()} == {"cpu"}
        torch.cuda.synchronize()
        assert gpu.allocated == before
        assert all(parameter.grad is not None for parameter in model.parameters())
