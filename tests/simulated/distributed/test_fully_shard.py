"""``fully_shard`` on one rank: bytes gathered, reduced and kept, worked out by hand.

Source: torch/distributed/fsdp/_fully_shard, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from pytest_gpumem import simulate
from pytest_gpumem.prediction.batch import unfilled
from pytest_gpumem.simulating import SimulatedRun

MIB = 1 << 20
LAYERS, WEIGHT, RANKS = 6, 16 * MIB, 8
SHARD = WEIGHT // RANKS
WORKSPACES = 2 * 32 * MIB
"""Of cuBLAS on an H100, of forward's thread and of backward's."""


def model() -> nn.Sequential:
    with unfilled():  # values are not needed
        return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(LAYERS)])


def sharded(**options: Any) -> Any:
    layers = model().cuda()
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(layers, **options)


def step(parallel: nn.Module) -> None:
    parallel(torch.randn(2, 2048, device="cuda")).sum().backward()


def large(gpu: SimulatedRun, run: Callable[[], object]) -> list[tuple[int, int]]:
    """Return streams and MiB that ``run`` allocates, and below zero frees; from 1 MiB."""
    before = len(gpu.trace)
    run()
    signs = {"alloc": 1, "free_requested": -1}
    events = (event for event in gpu.trace[before:] if event.action in signs)
    streams: dict[int, int] = {0: 0}
    return [
        (streams.setdefault(event.stream, len(streams)), signs[event.action] * event.size // MIB)
        for event in events
        if event.size >= MIB and event.size != WORKSPACES // 2
    ]


def test_parameters_become_shards_one_by_one() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        parallel = sharded()
        assert gpu.allocated == LAYERS * SHARD
        # The first shard is there before its unsharded parameter goes.
        assert gpu.peak_allocated == LAYERS * WEIGHT + SHARD
        assert isinstance(parallel, FSDPModule)


def test_a_layer_is_gathered_while_another_computes() -> None:
    with simulate("H100", world_size=RANKS) as gpu, torch.no_grad():
        parallel = sharded()
        x = torch.randn(2, 2048, device="cuda")
        parallel(x)
        events = large(gpu, lambda: parallel(x))
    # Each layer is gathered on a stream of its own (1), copied out to the unsharded parameter, and
    # what was gathered goes when the next layer's has been asked for: since 2.15 before it is
    # copied out (_fsdp_param_group.py, release_all_gather_state_for_comm_reuse).
    assert events[:4] == [(1, 16), (0, 16), (0, -16), (1, 16)]
    assert sum(size for _, size in events) == 0
    kept = 3 if torch.__version__ < "2.15" else 2
    assert max(_running(size for _, size in events)) == kept * 16


def _running(sizes: Any) -> list[int]:
    total, seen = 0, []
    for size in sizes:
        total += size
        seen.append(total)
    return seen


def test_gradients_are_sharded_and_kept() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        parallel = sharded()
        for _ in range(2):
            step(parallel)
            assert gpu.allocated == 2 * LAYERS * SHARD + WORKSPACES


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_that_are_not_resharded_stay_until_backward(reshard: bool) -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        layers = model().cuda()
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(layers)
        loss = layers(torch.randn(2, 2048, device="cuda")).sum()
        held = gpu.allocated - LAYERS * SHARD - WORKSPACES // 2
        assert held // WEIGHT == (0 if reshard else LAYERS)
        loss.backward()
        assert gpu.allocated == 2 * LAYERS * SHARD + WORKSPACES + 512


def test_parameters_of_half_the_size_are_gathered() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        parallel = sharded(mp_policy=policy)
        with torch.no_grad():
            parallel(torch.randn(2, 2048, device="cuda"))
            events = large(gpu, lambda: parallel(torch.randn(2, 2048, device="cuda")))
    # The cast shard, which is copied in, is a sixteenth of the layer.
    assert events[:3] == [(1, 1), (1, 8), (1, -1)]


def test_accumulated_gradients_are_not_sharded_without_synchronisation() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        parallel = sharded()
        parallel.set_requires_gradient_sync(False)
        step(parallel)
        assert gpu.allocated == LAYERS * (SHARD + WEIGHT) + WORKSPACES
        parallel.set_requires_gradient_sync(True)
        step(parallel)
        assert gpu.allocated == 2 * LAYERS * SHARD + WORKSPACES


def test_offloaded_parameters_and_gradients_are_on_the_host() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        parallel = sharded(offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(parallel.parameters())
        assert gpu.allocated == 0
        step(parallel)
        optimizer.step()
        assert gpu.allocated == WORKSPACES
        assert next(parallel.parameters()).device.type == "cpu"


def test_hybrid_sharding_splits_within_a_machine() -> None:
    with simulate("H100", world_size=32, rank=17) as gpu:
        mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
        parallel = sharded(mesh=mesh)
        step(parallel)
        assert gpu.allocated == 2 * LAYERS * SHARD + WORKSPACES


def test_ignored_parameters_stay_whole() -> None:
    if "ignored_params" not in signature(fully_shard).parameters:
        pytest.skip("came with torch 2.7")
    with simulate("H100", world_size=RANKS) as gpu:
        layers = model().cuda()
        ignored: Any = {layers[0].weight}
        fully_shard(layers, ignored_params=ignored)
        assert gpu.allocated == WEIGHT + (LAYERS - 1) * SHARD


def test_a_model_made_on_meta_allocates_shards_alone() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        with torch.device("meta"):
            layers = model()
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
        assert gpu.peak_allocated == 0
        layers.to_empty(device="cuda")
        for layer in layers:
            layer.reset_parameters()  # type: ignore[operator]  # a Linear's
        assert gpu.allocated == LAYERS * SHARD
        step(layers)


def test_a_model_left_on_meta_raises_torchs_error() -> None:
    with simulate("H100", world_size=RANKS):
        with torch.device("meta"):
            layers = model()
        fully_shard(layers)
        with pytest.raises(RuntimeError, match="should be materialized from meta device"):
            layers(torch.randn(2, 2048, device="cuda"))


def test_prefetching_gathers_more_at_once() -> None:
    peaks = {}
    for ahead in (1, 3):
        with simulate("H100", world_size=RANKS), torch.no_grad():
            parallel = sharded()
            for place, layer in enumerate(parallel):
                layer.set_modules_to_forward_prefetch(list(parallel)[place + 1 : place + 1 + ahead])
            x = torch.randn(2, 2048, device="cuda")
            parallel(x)
            torch.cuda.reset_peak_memory_stats()
            parallel(x)
            peaks[ahead] = torch.cuda.max_memory_allocated()
    assert peaks[3] - peaks[1] == 2 * WEIGHT


def test_gradients_are_clipped_across_ranks() -> None:
    with simulate("H100", world_size=RANKS) as gpu:
        parallel = sharded()
        step(parallel)
        before = gpu.allocated
        norm: Any = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        assert norm.full_tensor().shape == ()
        del norm
        assert gpu.allocated == before
        assert dist.is_initialized()
