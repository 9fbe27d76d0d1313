"""Errors of the allocator, with torch's text where torch raises the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpumem.allocator.releases import HINT_NAMES_ALLOC_CONF, NO_HINT_IF_EXPANDABLE
from pytest_gpumem.sizes import GIB, KIB, MIB


class AllocatorError(ValueError):
    """A request that the allocator cannot serve; the message is one sentence."""


@dataclass(frozen=True)
class OutOfMemoryFields:
    """The numbers of an out-of-memory message; all in bytes except ``device``."""

    device: int
    segment: int
    """Bytes requested from the driver: the segment, not the request."""
    requested: int
    """The request after rounding."""
    total: int
    free: int
    """Free on the device when the driver refused."""
    limit: int | None
    """The memory fraction's limit, where one is set."""
    allocated: int
    reserved: int
    process: int
    """In use by the process: reserved, and the context outside the allocator."""
    private_free: int = 0
    """Free cached blocks of private pools."""
    others: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the device that other processes use, by PID."""


class OutOfMemory(RuntimeError):  # noqa: N818 - reads as torch.OutOfMemoryError does
    """The device is full. ``str()`` is torch's text, the numbers are in ``fields``."""

    tried_everything = False
    """Whether torch calls ``oom_observers_`` for it, unlike for a request refused at once."""

    def __init__(self, message: str, fields: OutOfMemoryFields) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[type[OutOfMemory], tuple[str, OutOfMemoryFields]]:
        return OutOfMemory, (str(self), self.fields)


def format_size(size: int) -> str:
    """Return a size in torch's format (``format_size`` in c10/core/AllocatorConfig)."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def out_of_memory_message(
    fields: OutOfMemoryFields, version: tuple[int, int], *, expandable: bool = False
) -> str:
    """Return torch's text of ``torch.OutOfMemoryError`` in the release ``version``."""
    allowed = "" if fields.limit is None else f"{format_size(fields.limit)} allowed; "
    in_pools = fields.private_free
    private = ""
    if in_pools:
        private = f"with {format_size(in_pools)} allocated in private pools (e.g., CUDA Graphs), "
    # reportProcessMemoryInfo in c10/cuda/CUDACachingAllocator.cpp
    others = "".join(
        f"Process {process} has {format_size(size)} memory in use. "
        for process, size in sorted(fields.others.items())
    )
    unallocated = fields.reserved - fields.allocated - in_pools
    return (
        f"CUDA out of memory. Tried to allocate {format_size(fields.segment)}. GPU {fields.device}"
        f" has a total capacity of {format_size(fields.total)} of which {format_size(fields.free)}"
        f" is free. {others}Including non-PyTorch memory, this process has"
        f" {format_size(fields.process)} memory in use. {allowed}Of the allocated memory"
        f" {format_size(fields.allocated + in_pools)} is allocated by PyTorch, {private}and"
        f" {format_size(unallocated)} is reserved by PyTorch but unallocated."
        f"{_hint(version, expandable=expandable)}"
    )


def rejection_message(size: int) -> str:
    """Return torch's text for a request that ``throw_on_cudamalloc_oom`` refuses (2.12)."""
    return (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
        f" per_process_memory_fraction limit. Requested size: {format_size(size)}"
    )


def _hint(version: tuple[int, int], *, expandable: bool) -> str:
    """Return the advice at the end: its words changed with 2.10 and 2.11, its condition with 2.14.

    That of 2.15 where segments are expandable, about virtual addresses, is left out.
    """
    if expandable and version >= NO_HINT_IF_EXPANDABLE:
        return ""
    variable = (
        "PYTORCH_ALLOC_CONF" if version == HINT_NAMES_ALLOC_CONF else "PYTORCH_CUDA_ALLOC_CONF"
    )
    page = (
        "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        if version <= HINT_NAMES_ALLOC_CONF
        else "https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
    )
    return (
        " If reserved but unallocated memory is large try setting"
        f" {variable}=expandable_segments:True to avoid fragmentation."
        f"  See documentation for Memory Management  ({page})"
    )
