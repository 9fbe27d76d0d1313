"""The caching allocator's statistics, read without visible effects on the body of a test.

The meter resets peaks wherever a phase begins or ends. That must not change
``torch.cuda.max_memory_allocated()`` in the body, and ``torch.cuda.reset_peak_memory_stats()`` in
the body must not disturb the meter. So these functions are wrapped while a test runs: the peaks
before the meter's resets are included in the values that the body reads.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import pytest
import torch

from pytest_gpumem.garbage import paused
from pytest_gpumem.simulated.gpu import workspaces
from pytest_gpumem.simulated.gpu.device import parse_version

_POOLS = ("large_pool", "small_pool")
MOST_IN_SMALL_POOL = 1 << 20
"""Bytes of the largest block in the small pool (``kSmallSize`` of
c10/cuda/CUDACachingAllocator.cpp)."""

MOST_UNRESET = 64
"""The most readings of a device that are kept before merging them; each has some 100 numbers."""


@dataclass(frozen=True)
class Bytes:
    """Allocated and reserved bytes."""

    allocated: int = 0
    reserved: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.allocated + other.allocated, self.reserved + other.reserved)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.allocated - other.allocated, self.reserved - other.reserved)

    def at_least(self, other: Bytes) -> Bytes:
        """Return the larger value of each."""
        return Bytes(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


@dataclass(frozen=True)
class Reading:
    """A device's statistics: the current values, and the peaks since they were last reset."""

    held: Bytes = Bytes()
    """The current values."""
    peak: Bytes = Bytes()
    """The highest values."""
    bytes_ever_allocated: int = 0
    """The bytes of all allocations so far: a counter that never decreases."""
    in_pools: Callable[[], tuple[int, ...]] = field(default=tuple, compare=False)
    """Function that returns the live blocks and bytes of the pools that can hold a workspace, and
    the number of times that workspaces were cleared; empty: not known. It is called only where a
    phase ends: reading the size of workspaces from torch fixes it."""

    @property
    def without_peak(self) -> Reading:
        """The reading with the current values as its peaks."""
        return replace(self, peak=self.held)


class Block(NamedTuple):
    """A live block of the allocator."""

    device: int
    address: int
    size: int


Readings = Mapping[int, Reading]
"""Readings by device index."""


class CudaStatistics:
    """``torch.cuda``'s statistics of every visible device, real or simulated.

    It does not initialise CUDA: until the test does so, every reading is empty. It must be created
    and used while the device is active. ``workspaces`` returns the live workspaces, where they are
    known; else they are recognised by size.
    """

    def __init__(self, workspaces: Callable[[], frozenset[Block]] | None = None) -> None:
        self._workspaces = workspaces
        self._stats: Callable[[int], dict[str, Any]] = torch._C._cuda_memoryStats
        self._reset_peaks: Callable[[int], None] = torch._C._cuda_resetPeakMemoryStats
        self._unreset: dict[int, list[dict[str, Any]]] = {}
        """Readings of each device since the body's last reset; their peaks belong to the body."""
        self.listeners: list[Callable[[Readings], None]] = []
        """Callbacks for every reading, because reading the peaks resets them."""
        self._unmeasured = False
        self._clear: Callable[[], None] = torch._C._cuda_clearCublasWorkspaces
        self._times_cleared = 0

    def read_and_reset_peaks(self) -> Readings:
        """Return each device's reading, and reset its peaks, but not those that the body sees."""
        readings = {}
        for device in self._devices():
            stats = self._stats(device)
            unreset = self._unreset.setdefault(device, [])
            unreset.append(stats)
            # Merging is slow, and few bodies read their peaks: merge only when many are kept.
            if len(unreset) >= MOST_UNRESET:
                unreset[:] = [_with_highest_peaks(stats, unreset)]
            self._reset_peaks(device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            readings[device] = Reading(
                held=Bytes(allocated["current"], reserved["current"]),
                peak=Bytes(allocated["peak"], reserved["peak"]),
                bytes_ever_allocated=allocated["allocated"],
                in_pools=partial(_in_pools, device, stats, self._times_cleared),
            )
        if not self._unmeasured:
            for listener in self.listeners:
                listener(readings)
        return readings

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Report no peaks inside to listeners."""
        self.read_and_reset_peaks()
        self._unmeasured = True
        try:
            yield
        finally:
            self.read_and_reset_peaks()  # the peaks inside
            self._unmeasured = False
            self.read_and_reset_peaks()

    def live_blocks(self) -> frozenset[Block]:
        """Return every block in use, except freed ones that a stream still uses.

        Those are "active" until the allocator's next allocation, and are no leaks.
        """
        return frozenset(self._active({}))

    def possible_workspaces(self) -> frozenset[Block]:
        """Return the blocks in use that can be workspaces of cuBLAS and cuBLASLt."""
        if self._workspaces is not None:
            return self._workspaces()
        sizes = {device: possible_sizes(device) for device in self._devices()}
        if not any(known is None or known for known in sizes.values()):
            return frozenset()  # a snapshot of the allocator takes milliseconds
        return frozenset(self._active(sizes))

    def dropout_states(self) -> frozenset[Block]:
        """Return the states of the dropout of recurrent layers, which torch never frees."""
        units = {device: _properties(device).multi_processor_count for device in self._devices()}
        sizes = {device: {workspaces.dropout_state_bytes(count)} for device, count in units.items()}
        return frozenset(self._active(sizes))

    def synchronize(self) -> None:
        """Wait for every device in use; one without allocations is left untouched."""
        for device in self._devices():
            if self._stats(device)["reserved_bytes"]["all"]["current"]:
                torch.cuda.synchronize(device)

    def clear_workspaces(self) -> None:
        """Free the cuBLAS and cuBLASLt workspaces of every thread and stream."""
        if torch.cuda.is_initialized():
            self._body_clears()

    def empty_cache(self) -> None:
        """Return unused segments to the driver."""
        torch.cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Restart the body's peaks at the current values."""
        self._unreset.clear()
        for device in self._devices():
            self._reset_peaks(device)

    @contextmanager
    def own_peaks_shown(self) -> Iterator[None]:
        """Show the body the peaks since its own last reset, without the meter's resets."""
        replacements = {
            "_cuda_memoryStats": self._body_stats,
            "_cuda_resetPeakMemoryStats": self._body_reset,
            "_accelerator_getDeviceStats": self._body_stats,
            "_accelerator_resetPeakStats": self._body_reset,
            "_cuda_clearCublasWorkspaces": self._body_clears,
        }
        with pytest.MonkeyPatch.context() as patches:
            for name, replacement in replacements.items():
                if hasattr(torch._C, name):  # torch.accelerator's memory functions came with 2.9
                    patches.setattr(torch._C, name, replacement)
            yield

    def _body_stats(self, device: int) -> dict[str, Any]:
        unreset = self._unreset.get(device, [])
        if len(unreset) > 1:
            unreset[:] = [_with_highest_peaks(unreset[-1], unreset)]
        return _with_highest_peaks(self._stats(device), unreset)

    def _body_reset(self, device: int) -> None:
        self.read_and_reset_peaks()
        self._unreset.pop(device, None)
        self._reset_peaks(device)

    def _body_clears(self) -> None:
        self._times_cleared += 1
        self._clear()

    def _active(self, sizes: Mapping[int, Set[int] | None]) -> Iterator[Block]:
        """Yield the blocks in use whose requested bytes are among the ``sizes`` of their device."""
        # A snapshot takes ten times as long as the statistics.
        if not any(self._stats(i)["allocated_bytes"]["all"]["current"] for i in self._devices()):
            return
        for segment in torch.cuda.memory_snapshot(**self._snapshot_options):
            device = segment["device"]
            known = sizes.get(device)
            for block in segment["blocks"]:
                if block["state"] != "active_allocated":
                    continue
                if known is None or block["requested_size"] in known:
                    yield Block(device, block["address"], block["size"])

    def _devices(self) -> range:
        return range(self._device_count) if torch.cuda.is_initialized() else range(0)

    @cached_property
    def _device_count(self) -> int:
        return torch.cuda.device_count()

    @cached_property
    def _snapshot_options(self) -> dict[str, bool]:
        # Copying a recorded history would cost more than the blocks; the option came with 2.11.
        known = inspect.signature(torch.cuda.memory_snapshot).parameters
        return {"include_traces": False} if "include_traces" in known else {}


def _in_pools(device: int, stats: Mapping[str, Any], cleared: int) -> tuple[int, ...]:
    """Return :attr:`Reading.in_pools`; empty where the backend does not count pools."""
    blocks, size = stats["allocation"], stats["allocated_bytes"]
    if sum(blocks[pool]["current"] for pool in _POOLS) != blocks["all"]["current"]:
        return ()
    sizes = possible_sizes(device)
    small = sizes is None or any(size <= MOST_IN_SMALL_POOL for size in sizes)
    pools = _POOLS if small else _POOLS[:1]
    return (*(each[pool]["current"] for pool in pools for each in (blocks, size)), cleared)


def _with_highest_peaks(
    stats: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return ``stats`` with the highest peaks among them and the ``earlier`` ones."""
    result = {}
    for key, value in stats.items():
        before = [each[key] for each in earlier if key in each]
        if isinstance(value, dict):
            value = _with_highest_peaks(value, before)
        elif key == "peak":
            value = max([value, *before])
        result[key] = value
    return result


def possible_sizes(device: int) -> frozenset[int] | None:
    """Return the bytes that torch requests for a workspace on ``device``; ``None``: not known.

    Empty where each operation allocates and frees its workspace, as since 2.15; ``None`` for ROCm.
    Sources: :mod:`pytest_gpumem.simulated.gpu.workspaces`.
    """
    if torch.version.hip is not None:
        return None
    if _has_workspace_per_operation():
        return frozenset()
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    found = _properties(device)
    sizes = _sizes(config, (found.major, found.minor))
    # Since 2.13 code may set them (torch.backends.cuda).
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    return sizes | {getattr(torch._C, name)() for name in names if hasattr(torch._C, name)}


@cache
def _has_workspace_per_operation() -> bool:
    return workspaces.WorkspaceSettings(parse_version(None), (0, 0), None).per_operation


@cache
def _sizes(config: str | None, capability: tuple[int, int]) -> frozenset[int]:
    version = parse_version(None)
    ours = workspaces.workspace_bytes(config, version, capability)
    # 2.14 lists more GPUs with the large size than earlier releases. An additional size does no
    # harm; without a size, a workspace would not be recognised.
    return frozenset({ours, workspaces.lt_workspace_bytes(version, ours), workspaces.LARGE_BYTES})


def _properties(device: int) -> Any:
    # Not get_device_properties(): it calls device_count(), so that a fixture in its set-up would
    # seem to depend on the device.
    return torch.cuda._get_device_properties(device)  # type: ignore[attr-defined]  # C++ sets it


Pause = Callable[[], AbstractContextManager[None]]

_pauses: list[Pause] = []
"""The functions that pause a current measurement; all of them measure this process."""


@contextmanager
def unmeasured() -> Iterator[None]:
    """Exclude events inside from every measurement; remaining memory counts from the end on."""
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        yield


@contextmanager
def pausable(pause: Pause) -> Iterator[None]:
    """Enter ``pause`` around :func:`unmeasured` work inside."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)


def clear_workspaces(statistics: CudaStatistics) -> tuple[frozenset[Block], frozenset[Block]]:
    """Free the cuBLAS and cuBLASLt workspaces; return their blocks, and the remaining blocks.

    torch does not mark workspace blocks: they are the candidates that disappear when workspaces
    are cleared. Garbage does not disappear, because the collector is paused.
    """
    with paused():
        candidates = statistics.possible_workspaces()
        statistics.clear_workspaces()
        after = statistics.live_blocks()
    return candidates - after, after
