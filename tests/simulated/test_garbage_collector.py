"""Python's garbage collector frees tensors wherever it runs, also inside the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.allocator import allocator as allocator_module
from pytest_gpumem.simulated.allocator.blocks import Block

BLOCK = 512


@pytest.fixture
def gpu() -> Iterator[Any]:
    with simulate("A100-40GB", alloc_conf="") as gpu:
        gc.collect()
        gc.disable()
        yield gpu
        gc.enable()


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """From now on the allocator cannot make a block without garbage being collected."""

    def make() -> Block:
        gc.collect()
        return Block()

    return lambda: monkeypatch.setattr(allocator_module, "Block", make)


def garbage(nbytes: int = BLOCK) -> int:
    """Drop a tensor that only the collector can free; return its address."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    cycle: list[Any] = [tensor]
    cycle.append(cycle)
    return tensor.data_ptr()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_neighbour_dies_while_a_block_is_split(gpu: Any, collecting: Any) -> None:
    dead = garbage()
    collecting()
    made = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    # The block behind it was chosen before the collector ran, as it would be on a GPU.
    assert made.data_ptr() == dead + BLOCK
    assert torch.cuda.memory_allocated() == BLOCK
    actions = [(entry.action, entry.addr) for entry in gpu.trace if "segment" not in entry.action]
    assert actions[-3:] == [
        ("alloc", dead + BLOCK),
        ("free_requested", dead),
        ("free_completed", dead),
    ]
    again = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    assert again.data_ptr() == dead
    del made, again
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_garbage_is_freed_although_the_allocation_fails(gpu: Any, collecting: Any) -> None:
    garbage()
    collecting()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def test_the_collector_runs_all_the_time(gpu: Any) -> None:
    before = gc.get_threshold()
    gc.enable()
    gc.set_threshold(1, 1, 1)
    try:
        live = []
        for size in range(1, 400):
            garbage(size * 97 % 5000 + 1)
            live.append(torch.empty(size * 113 % 7000 + 1, device="cuda"))
            if size % 3 == 0:
                del live[len(live) // 2]
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in live)
        assert all(one[1] <= other[0] for one, other in zip(ranges, ranges[1:], strict=False))
        live.clear()
        gc.collect()
    finally:
        gc.set_threshold(*before)
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_a_snapshot_shows_what_was_live_when_it_began(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = garbage()
    real = gpu.allocator.every_block

    def every_block() -> Iterator[Block]:
        for block in real():
            gc.collect()
            yield block

    monkeypatch.setattr(type(gpu.allocator), "every_block", lambda memory: every_block())
    blocks = [block for segment in gpu.allocator.segments() for block in segment["blocks"]]
    assert [(block["address"], block["state"]) for block in blocks] == [
        (dead, "active_allocated"),
        (dead + BLOCK, "inactive"),
    ]
    assert torch.cuda.memory_allocated() == 0
