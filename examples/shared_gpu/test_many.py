"""Tests that need 0.2 to 12 GiB of one 16 GiB GPU, and wait more than they compute."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

TESTS = int(os.environ.get("SHARED_GPU_TESTS", "8"))
SEED = int(os.environ.get("SHARED_GPU_SEED", "0"))
SECONDS = 0.2
SEGMENT = 2 * 2**20


def sizes() -> list[int]:
    """Bytes of each test: evenly spread over orders of magnitude, in whole segments."""
    generator = random.Random(SEED)
    return [round(0.2 * 60 ** generator.random() * 2**30 / SEGMENT) * SEGMENT for _ in range(TESTS)]


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=pytest.mark.gpumem(max_reserved=size)) for size in sizes()],
)
@pytest.mark.gpumem(gpu="V100", baseline=False)
def test_takes_its_memory(size: int) -> None:
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    time.sleep(SECONDS)  # stands for a disk, a download or a compiler
    assert x.nbytes == size
