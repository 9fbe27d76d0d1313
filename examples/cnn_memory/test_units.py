"""Units, types and the sizes of images."""

from __future__ import annotations

import pytest
import torch

from examples.cnn_memory.models import bytes_of
from pytest_gpumem.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1K", 1024),
        ("1M", 1024**2),
        ("1G", 1024**3),
        ("1T", 1024**4),
        ("1KB", 1000),
        ("1MB", 1000**2),
        ("1GB", 1000**3),
        ("1TB", 1000**4),
    ],
)
def test_units(text: str, size: int) -> None:
    assert parse_size(text) == size


BYTES = {
    torch.float64: 8,
    torch.float32: 4,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.int64: 8,
    torch.int32: 4,
    torch.int16: 2,
    torch.int8: 1,
    torch.uint8: 1,
    torch.bool: 1,
}


@pytest.mark.gpumem(max_leak=0, baseline=False)
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bytes_per_element(dtype: torch.dtype) -> None:
    x = torch.zeros(1000, dtype=dtype, device="cuda")
    assert x.nbytes == 1000 * BYTES[dtype]


# In whole blocks of 512 bytes.
@pytest.mark.gpumem(max=3_000_320, max_leak=0, baseline=False)
def test_an_image_of_3_megabytes() -> None:
    image = torch.zeros(500, 500, 3, device="cuda")
    assert image.nbytes == bytes_of(500, 500, 3) == parse_size("3MB")


# From 10 MiB up, a block is a multiple of 2 MiB if less than 1 MiB would be left of it.
@pytest.mark.gpumem(max="30MiB", max_leak=0, baseline=False)
def test_a_batch_of_31_megabytes() -> None:
    batch = torch.zeros(256, 3, 100, 100, device="cuda")
    assert batch.nbytes == 30_720_000
    assert round(batch.nbytes / 1000**2) == 31
