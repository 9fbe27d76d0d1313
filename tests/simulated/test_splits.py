"""Inactive splits derived from events equal those that the allocator counts."""

from __future__ import annotations

import random

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.allocator import Allocator
from pytest_gpumem.measurement.recorded import SimulatedRecorder
from pytest_gpumem.simulated.splits import Splits

MIB = 1 << 20


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:21", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(3))
def test_derived_splits_equal_the_allocators_after_every_event(seed: int, conf: str) -> None:
    draw = random.Random(seed)
    live: list[torch.Tensor] = []
    with simulate("T4", alloc_conf=conf) as gpu:
        allocator = gpu._gpu.simulation.gpus[0].allocator
        said = {}
        segments = allocator.segments(frames=False)
        for turn in range(400):
            if live and draw.random() < 0.45:
                live.pop(draw.randrange(len(live)))
            elif turn % 90 == 80:
                torch.cuda.empty_cache()
            else:
                nbytes = draw.choice([draw.randint(1, 2 * MIB), draw.randint(1, 60 * MIB)])
                live.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
            said[allocator.trace.position] = allocator.inactive_split
        follow = list(Splits(segments).after(allocator.trace.raw(0)))
        assert {position: follow[position - 1] for position in said if position} == {
            position: bytes for position, bytes in said.items() if position
        }
        assert max(follow) > MIB or "expandable" in conf
        live.clear()


def test_splits_can_be_derived_from_any_event_on() -> None:
    allocator = Allocator(1 << 34)
    first = allocator.malloc(3 * MIB)
    begin = allocator.trace.position
    splits = Splits(allocator.segments(frames=False))
    assert splits.bytes == 17 * MIB
    allocator.malloc(5 * MIB)
    allocator.free(first)
    assert list(splits.after(allocator.trace.raw(begin))) == [12 * MIB, 15 * MIB]


def test_splits_that_contradict_the_allocator_are_not_reported() -> None:
    with simulate("T4") as gpu:
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        recorder = SimulatedRecorder(gpu._gpu.simulation)
        position = recorder.positions()[0]
        assert list(recorder.splits(0, position, recorder.segments(0))) == [17 * MIB]
        assert list(recorder.splits(0, position, [])) == []
    del kept
