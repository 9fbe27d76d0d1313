"""Memory that each fixture's set-up takes and holds, apart from the fixtures that it requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.statistics import Bytes
from tests.fake_statistics import SEGMENT, FakeStatistics


@pytest.fixture
def device() -> FakeStatistics:
    return FakeStatistics()


class Ledger(FixtureRecords):
    """Records of one device that count their clean-ups."""

    def __init__(self, device: FakeStatistics) -> None:
        super().__init__()
        self._device = device
        self.tidied = 0

    @contextmanager
    def setting_up(self, name: str) -> Iterator[list[str]]:
        with self.metering(name, self._device, self._tidy) as nested:
            yield nested

    def _tidy(self) -> None:
        self.tidied += 1
        self._device.clear_workspaces()
        self._device.empty_cache()


@pytest.fixture
def ledger(device: FakeStatistics) -> Ledger:
    return Ledger(device)


def test_a_fixture_holds_bytes_its_set_up_leaves(device: FakeStatistics, ledger: Ledger) -> None:
    device.allocate(5)
    with ledger.setting_up("model"):
        device.use(700)
        device.allocate(100)
        device.allocate(64, workspace=True)

    record = ledger.record("model")
    assert record.held == {0: Bytes(100, 0)}
    assert record.peak == {0: Bytes(700, 0)}


def test_reserved_segments_are_held_too(device: FakeStatistics, ledger: Ledger) -> None:
    with ledger.setting_up("model"):
        device.use(2 * SEGMENT + 1)
        device.allocate(SEGMENT + 1)

    record = ledger.record("model")
    assert record.held == {0: Bytes(SEGMENT + 1, 2 * SEGMENT)}
    assert record.peak == {0: Bytes(2 * SEGMENT + 1, 3 * SEGMENT)}


def test_nested_set_ups_count_for_the_inner_fixture(device: FakeStatistics, ledger: Ledger) -> None:
    with ledger.setting_up("outer"):
        device.allocate(10)
        with ledger.setting_up("inner"):
            device.use(500)
            device.allocate(100)
        device.use(30)

    assert ledger.record("inner").held == {0: Bytes(100, 0)}
    assert ledger.record("outer").held == {0: Bytes(10, SEGMENT)}
    assert ledger.record("inner").peak[0].allocated == 500
    assert ledger.record("outer").peak[0].allocated == 40
    assert ledger.with_nested(["outer"]) == ["inner", "outer"]
    assert ledger.held(["outer"]) == {0: Bytes(110, SEGMENT)}


def test_set_ups_nest_to_any_depth(device: FakeStatistics, ledger: Ledger) -> None:
    with ledger.setting_up("outer"):
        device.allocate(1)
        with ledger.setting_up("middle"):
            device.allocate(20)
            with ledger.setting_up("inner"):
                device.allocate(300)

    held = [ledger.record(name).held[0].allocated for name in ("outer", "middle", "inner")]
    assert held == [1, 20, 300]


def test_no_clean_up_follows_a_set_up_that_allocates_nothing(
    device: FakeStatistics, ledger: Ledger
) -> None:
    with ledger.setting_up("server"):
        pass
    assert ledger.tidied == 0

    with ledger.setting_up("outer"), ledger.setting_up("inner"):
        device.use(1)
    assert ledger.tidied == 1


def test_a_failed_set_up_leaves_nothing_open(device: FakeStatistics, ledger: Ledger) -> None:
    with pytest.raises(RuntimeError), ledger.setting_up("broken"):
        raise RuntimeError
    with ledger.setting_up("next"):
        device.allocate(3)

    assert ledger.record("next").held[0].allocated == 3
    assert device.listeners == []


def test_the_setup_phase_is_the_same_for_a_fixture_set_up_earlier(
    device: FakeStatistics, ledger: Ledger
) -> None:
    for name, used, kept in (("second", 90, 7), ("first", 50, 20)):
        with ledger.setting_up(name):
            device.use(used)
            device.allocate(kept)

    phase = ledger.setup_phase(["first", "second"], 0)

    assert (phase.peak_allocated, phase.allocated_after) == (20 + 90, 27)


def test_a_fixture_torn_down_is_forgotten(device: FakeStatistics, ledger: Ledger) -> None:
    with ledger.setting_up("model"):
        device.allocate(100)
    ledger.forget("model")
    ledger.forget("never seen")

    assert ledger.held(["model"]) == {}


def test_memory_is_explained_by_fixtures_and_by_uncollected_garbage(
    device: FakeStatistics, ledger: Ledger
) -> None:
    def allocated() -> dict[int, int]:
        readings = device.read_and_reset_peaks()
        return {index: now.held.allocated for index, now in readings.items()}

    stray = device.allocate(50)
    assert not ledger.explains(allocated())

    ledger.garbage_collected(allocated())
    assert ledger.explains(allocated())

    with ledger.setting_up("model"):
        device.allocate(100)
    assert ledger.explains(allocated())

    device.allocate(1)
    assert not ledger.explains(allocated())

    ledger.garbage_collected(allocated())
    ledger.forget("model")
    assert not ledger.explains(allocated())
    device.free(stray)
    assert not ledger.explains(allocated())
