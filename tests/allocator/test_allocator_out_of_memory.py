"""A full device: when the error is raised, and its message by torch release."""

from __future__ import annotations

import pickle

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorError,
    AllocatorSettings,
    OutOfMemory,
)
from pytest_gpumem.allocator.messages import format_size

MIB, GIB = 1 << 20, 1 << 30

START = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 1024.00 MiB"
    " of which 14.00 MiB is free. Including non-PyTorch memory, this process has 1010.00 MiB memory"
    " in use. Of the allocated memory 900.00 MiB is allocated by PyTorch, and 10.00 MiB is reserved"
    " by PyTorch but unallocated."
)
OLD_PAGE = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_PAGE = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)


def full(version: tuple[int, int] = (2, 13), fraction: float | None = None) -> OutOfMemory:
    """Return the error of a 1 GiB device: 900 MiB allocated, 10 MiB cached for another stream."""
    allocator = Allocator(GIB, version=version, device=1, used_elsewhere=100 * MIB)
    if fraction is not None:
        allocator.set_memory_fraction(fraction)
    allocator.malloc(890 * MIB)
    allocator.malloc(5 * MIB)
    allocator.malloc(5 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(9 * MIB - 100, stream=1)
    return caught.value


@pytest.mark.parametrize(
    ("version", "variable", "page"),
    [
        ((2, 6), "PYTORCH_CUDA_ALLOC_CONF", OLD_PAGE),
        ((2, 9), "PYTORCH_CUDA_ALLOC_CONF", OLD_PAGE),
        ((2, 10), "PYTORCH_ALLOC_CONF", OLD_PAGE),
        ((2, 11), "PYTORCH_CUDA_ALLOC_CONF", NEW_PAGE),
        ((2, 13), "PYTORCH_CUDA_ALLOC_CONF", NEW_PAGE),
        ((2, 15), "PYTORCH_CUDA_ALLOC_CONF", NEW_PAGE),
    ],
)
def test_messages_follow_the_release(version: tuple[int, int], variable: str, page: str) -> None:
    assert str(full(version)) == (
        f"{START} If reserved but unallocated memory is large try setting"
        f" {variable}=expandable_segments:True to avoid fragmentation."
        f"  See documentation for Memory Management  ({page})"
    )


def test_the_message_names_the_limit_of_the_process() -> None:
    assert "1010.00 MiB memory in use. 911.36 MiB allowed; Of the allocated" in str(
        full(fraction=0.89)
    )


def test_the_error_has_the_numbers_as_fields() -> None:
    fields = full().fields

    assert (fields.device, fields.segment, fields.requested) == (1, 20 * MIB, 9 * MIB)
    assert (fields.total, fields.free, fields.limit) == (GIB, 14 * MIB, None)
    assert (fields.allocated, fields.reserved, fields.process) == (900 * MIB, 910 * MIB, 1010 * MIB)


def test_the_error_survives_a_process_boundary() -> None:
    error = full()

    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.fields) == (str(error), error.fields)


def test_out_of_memory_is_counted_and_the_allocator_stays_usable() -> None:
    allocator = Allocator(GIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(2 * GIB)

    assert allocator.stats()["num_ooms"] == 1
    assert allocator.malloc(GIB) == 0x7F0000000000
    assert allocator.allocated == GIB


def test_a_fraction_limits_what_is_reserved() -> None:
    allocator = Allocator(GIB)
    allocator.set_memory_fraction(0.5)
    allocator.malloc(500 * MIB)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(20 * MIB)

    assert caught.value.fields.limit == 512 * MIB
    allocator.malloc(12 * MIB)


@pytest.mark.parametrize(("version", "limit"), [((2, 9), 10), ((2, 12), 10), ((2, 13), 11)])
def test_a_fractions_limit_is_rounded_since_2_13(version: tuple[int, int], limit: int) -> None:
    allocator = Allocator(21, version=version)
    allocator.set_memory_fraction(0.5)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(512)

    assert caught.value.fields.limit == limit


@pytest.mark.parametrize(("version", "limit"), [((2, 9), GIB), ((2, 10), None)])
def test_a_fraction_of_1_lifts_the_limit_since_2_10(
    version: tuple[int, int], limit: int | None
) -> None:
    allocator = Allocator(GIB, version=version)
    allocator.set_memory_fraction(0.5)
    allocator.set_memory_fraction(1.0)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(2 * GIB)

    assert caught.value.fields.limit == limit


def test_a_fraction_outside_0_to_1_is_an_error() -> None:
    with pytest.raises(AllocatorError, match=r"Invalid fraction value: 1\.5\. Allowed range: 0~1"):
        Allocator(GIB).set_memory_fraction(1.5)


def test_a_partial_release_of_oversize_blocks_is_followed_by_a_full_one() -> None:
    allocator = Allocator(100 * MIB, AllocatorSettings.parse("max_split_size_mb:24"))
    cached = [allocator.malloc(40 * MIB), allocator.malloc(30 * MIB, stream=1)]
    for address in cached:
        allocator.free(address)

    allocator.malloc(50 * MIB)

    # 40 MiB of this stream are less than the 50 asked for, though they would have been enough.
    assert allocator.reserved == 50 * MIB
    assert allocator.stats()["num_alloc_retries"] == 1


def test_releasing_the_streams_own_oversize_blocks_may_be_enough() -> None:
    allocator = Allocator(110 * MIB, AllocatorSettings.parse("max_split_size_mb:24"))
    cached = [allocator.malloc(size * MIB) for size in (26, 30)]
    cached.append(allocator.malloc(50 * MIB, stream=1))
    for address in cached:
        allocator.free(address)

    allocator.malloc(56 * MIB)

    assert allocator.reserved == 106 * MIB
    assert allocator.stats()["num_alloc_retries"] == 0


def test_a_request_of_an_exabyte_is_refused_at_once() -> None:
    with pytest.raises(OutOfMemory) as caught:
        Allocator(GIB).malloc(1 << 60)

    assert str(caught.value) == "CUDA out of memory. Tried to allocate more than 1EB memory."


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (20 * MIB, "20.00 MiB"),
        (GIB, "1024.00 MiB"),
        (GIB + GIB // 2, "1.50 GiB"),
    ],
)
def test_messages_format_sizes_as_torch_does(size: int, text: str) -> None:
    assert format_size(size) == text
