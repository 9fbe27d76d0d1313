"""Limits on the memory that a process reserves, enforced by the caching allocator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from pytest_gpumem.sharing.admission import FailedAllocation
from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.environment import alloc_conf_variable

SEGMENT = 2 * 2**20
"""Bytes of the smallest segment that the allocator requests from the driver."""


class QuotaError(Exception):
    """A quota did not take effect; the message is one sentence for the user."""


@contextmanager
def limited(index: int, size: int) -> Iterator[None]:
    """Limit this process to reserving ``size`` bytes of ``cuda:index`` inside.

    Cached blocks are released first: they count as reserved, and no limit applies to their reuse.
    The limit is tested by an allocation. Raises :class:`QuotaError` if more can be reserved, or is
    reserved already.
    """
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(index).total_memory
    if size >= total:
        yield
        return
    found = torch.cuda.get_per_process_memory_fraction(index)
    # The allocator rounds the product down to whole bytes.
    fraction = (size + 0.5) / total
    torch.cuda.set_per_process_memory_fraction(fraction, index)
    try:
        _check_limit(index, size)
        with inherited(fraction):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(found, index)


@contextmanager
def inherited(fraction: float) -> Iterator[None]:
    """Limit each process that is started inside to reserving ``fraction`` of a device.

    This sets the allocator's ``per_process_memory_fraction``, which torch has since 2.10
    (c10/cuda/CUDAAllocatorConfig.h); earlier releases have no setting that a child inherits.
    """
    major, minor = map(int, torch.__version__.split(".")[:2])
    with pytest.MonkeyPatch.context() as patches:
        if (major, minor) >= (2, 10):
            setting = f"per_process_memory_fraction:{fraction:.12f}"
            name = alloc_conf_variable((major, minor))
            patches.setenv(name, ",".join(filter(None, (os.environ.get(name), setting))))
        yield


def _check_limit(index: int, size: int) -> None:
    held = torch.cuda.memory_reserved(index)
    if held > size:
        raise QuotaError(
            f"the quota of {format_size(size)} cannot hold: {format_size(held)} of cuda:{index} "
            f"are in use before the test begins"
        )
    free, _ = torch.cuda.mem_get_info(index)
    asked = size - held + SEGMENT
    if asked > free:
        return  # the device has too little free memory for a test
    try:
        address = torch.cuda.caching_allocator_alloc(asked, index)
    except torch.OutOfMemoryError:
        return
    torch.cuda.caching_allocator_delete(address)
    torch.cuda.empty_cache()
    raise QuotaError(
        f"the quota of {format_size(size)} did not take effect: {format_size(asked + held)} of "
        f"cuda:{index} could be reserved"
    )


Observer = Callable[[int, int, int, int], object]
"""Called with device, bytes of the segment, allowed and free bytes (``OutOfMemoryObserver`` of
c10/core/CachingDeviceAllocator.h), after the allocator has released its lock."""


@cache
def observers_of_torch() -> list[Observer]:
    """Return the list of observers that torch's allocator calls; torch itself can remove none."""
    observers: list[Observer] = []

    def observe(device: int, asked: int, allowed: int, free: int) -> None:
        for observer in tuple(observers):
            observer(device, asked, allowed, free)

    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # undeclared
    attach(observe)
    return observers


@contextmanager
def failed_allocations(
    observers: list[Observer], note: Callable[[int, int, int], FailedAllocation | None]
) -> Iterator[list[FailedAllocation]]:
    """Yield the list of results of ``note(device, requested bytes, free bytes)`` for refusals."""
    found: list[FailedAllocation] = []

    def observe(device: int, asked: int, allowed: int, free: int) -> None:
        if failed := note(device, asked, free):
            found.append(failed)

    observers.append(observe)
    try:
        yield found
    finally:
        observers.remove(observe)
