"""torch.cuda's statistics as the meter and as the body read them, on a simulated T4."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.measurement.statistics import Bytes, CudaStatistics, Reading, clear_workspaces

SMALL_SEGMENT = 2 * 1024**2
WORKSPACE = 8_519_680


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStatistics]:
    # The simulated release keeps workspaces, whatever the installed release does.
    monkeypatch.setattr(
        "pytest_gpumem.measurement.statistics._has_workspace_per_operation", lambda: False
    )
    with simulate("T4", torch_version="2.13"):
        torch.cuda.init()
        statistics = CudaStatistics()
        with statistics.own_peaks_shown():
            yield statistics


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_a_harvest_reads_and_resets_the_peaks(statistics: CudaStatistics) -> None:
    kept = empty(1024)
    empty(4096)

    assert statistics.read_and_reset_peaks()[0] == Reading(
        held=Bytes(1024, SMALL_SEGMENT),
        peak=Bytes(5120, SMALL_SEGMENT),
        bytes_ever_allocated=5120,
    )
    assert statistics.read_and_reset_peaks()[0].peak.allocated == kept.nbytes


def test_every_harvest_is_passed_to_all_listeners(statistics: CudaStatistics) -> None:
    heard: list[int] = []
    statistics.listeners.append(lambda readings: heard.append(readings[0].peak.allocated))

    empty(512)
    statistics.read_and_reset_peaks()
    empty(1024)
    torch.cuda.reset_peak_memory_stats()

    assert heard == [512, 1024]


def test_the_body_does_not_see_harvests(statistics: CudaStatistics) -> None:
    empty(4096)
    statistics.read_and_reset_peaks()
    empty(512)

    assert torch.cuda.max_memory_allocated() == 4096
    assert torch.cuda.memory_stats()["allocation.all.peak"] == 1
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 2


def test_a_reset_by_the_body_affects_the_body_s_peaks(statistics: CudaStatistics) -> None:
    empty(4096)
    statistics.read_and_reset_peaks()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0

    empty(512)
    statistics.read_and_reset_peaks()
    assert torch.cuda.max_memory_allocated() == 512


def test_the_body_does_not_see_harvests_by_torch_accelerator_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate("T4"):
        torch.cuda.init()
        # On a GPU these do not go through torch.cuda's own functions.
        stats, reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", stats, raising=False)
        monkeypatch.setattr(torch._C, "_accelerator_resetPeakStats", reset, raising=False)
        statistics = CudaStatistics()
        heard: list[int] = []
        statistics.listeners.append(lambda readings: heard.append(readings[0].peak.allocated))
        with statistics.own_peaks_shown():
            empty(4096)
            statistics.read_and_reset_peaks()
            accelerator_stats = torch._C._accelerator_getDeviceStats(0)
            empty(512)
            torch._C._accelerator_resetPeakStats(0)

    assert accelerator_stats["allocated_bytes"]["all"]["peak"] == 4096
    assert heard == [4096, 512]


def test_peaks_that_are_forgotten_are_reset_for_the_body_too(statistics: CudaStatistics) -> None:
    empty(4096)
    statistics.read_and_reset_peaks()
    statistics.forget_peaks()

    assert torch.cuda.max_memory_allocated() == 0


def test_blocks_are_listed_with_address_and_rounded_size(statistics: CudaStatistics) -> None:
    first, second = empty(500), empty(2000)

    assert {(block.address, block.size) for block in statistics.live_blocks()} == {
        (first.data_ptr(), 512),
        (second.data_ptr(), 2048),
    }


def test_a_block_that_only_a_stream_uses_is_not_live(statistics: CudaStatistics) -> None:
    kept, dropped = empty(500), empty(2000)
    dropped.record_stream(torch.cuda.Stream())
    del dropped
    statistics.synchronize()

    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 512 + 2048
    assert [block.address for block in statistics.live_blocks()] == [kept.data_ptr()]


def test_cleared_workspaces_are_recognised_by_their_blocks(statistics: CudaStatistics) -> None:
    kept = empty(512)
    torch.empty(8, 8, device="cuda") @ torch.empty(8, 8, device="cuda")

    workspaces, left = clear_workspaces(statistics)

    assert [block.size for block in workspaces] == [WORKSPACE]
    assert [block.address for block in left] == [kept.data_ptr()]


def test_garbage_collected_while_clearing_is_no_workspace(
    statistics: CudaStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_many_objects() -> list[list[None]]:
        return [[] for _ in range(10 * gc.get_threshold()[0])]

    monkeypatch.setattr(statistics, "clear_workspaces", make_many_objects)
    gc.collect()
    cycle: list[object] = [empty(WORKSPACE), empty(4096)]
    cycle.append(cycle)
    del cycle

    workspaces, left = clear_workspaces(statistics)

    assert not workspaces
    assert sorted(block.size for block in left) == [4096, WORKSPACE]


def test_a_block_of_another_size_is_no_workspace(statistics: CudaStatistics) -> None:
    kept = [empty(WORKSPACE), empty(WORKSPACE - 512)]
    torch.empty(8, 8, device="cuda") @ torch.empty(8, 8, device="cuda")

    sizes = [block.size for block in statistics.possible_workspaces()]

    assert len(statistics.live_blocks()) == len(kept) + 1
    assert sizes == [WORKSPACE, WORKSPACE]


def test_the_cache_is_emptied(statistics: CudaStatistics) -> None:
    empty(512)
    statistics.synchronize()
    statistics.empty_cache()

    assert statistics.read_and_reset_peaks()[0].held.reserved == 0


def test_replaced_functions_are_restored() -> None:
    with simulate("T4"):
        before = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        with CudaStatistics().own_peaks_shown():
            assert torch._C._cuda_memoryStats is not before[0]
        assert (torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats) == before


def test_statistics_are_empty_before_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulate("T4"):
        statistics = CudaStatistics()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

        assert statistics.read_and_reset_peaks() == {}
        assert statistics.live_blocks() == frozenset()
        statistics.synchronize()
        statistics.clear_workspaces()
        statistics.forget_peaks()
