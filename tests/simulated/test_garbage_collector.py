"""Python's garbage collector may free tensors anywhere, also inside the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.allocator import allocator as allocator_module
from pytest_gpumem.allocator import snapshot
from pytest_gpumem.allocator.blocks import Block
from pytest_gpumem.allocator.state import AllocatorState

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
    """Return a function: from its call on, the allocator collects garbage with each new block."""

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
def test_a_neighbouring_block_may_be_freed_during_a_split(gpu: Any, collecting: Any) -> None:
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


def test_garbage_is_freed_even_if_the_allocation_fails(gpu: Any, collecting: Any) -> None:
    garbage()
    collecting()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def test_a_snapshot_shows_what_was_live_when_it_began(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = garbage()
    describe = snapshot._segment

    def collect_first(memory: AllocatorState, head: Block, *, frames: bool) -> dict[str, Any]:
        gc.collect()
        return describe(memory, head, frames=frames)

    monkeypatch.setattr(snapshot, "_segment", collect_first)
    (segment,) = torch.cuda.memory_snapshot()
    assert [(block["address"], block["state"]) for block in segment["blocks"]] == [
        (dead, "active_allocated"),
        (dead + BLOCK, "inactive"),
    ]
    assert torch.cuda.memory_allocated() == 0
