"""200 tests that need 0.2 to 12 GiB of one 16 GiB GPU, and wait more than they compute."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

GIB = 2**30
TESTS = 200
SEED = int(os.environ.get("SHARED_GPU_SEED", "0"))


def sizes() -> list[int]:
    """Bytes of each test: log-uniform, in segments of 2 MiB."""
    generator = random.Random(SEED)
    return [round(0.2 * 60 ** generator.random() * 512) * 2**21 for _ in range(TESTS)]


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=pytest.mark.gpumem(max=size, max_reserved=size)) for size in sizes()],
)
def test_takes_its_memory(size: int) -> None:
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    time.sleep(0.2)  # what waits here is a disk, a download or a compiler
    assert x.nbytes == size
