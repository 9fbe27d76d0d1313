"""The meter on a fake device: charged bytes, leaks, workspaces, runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.measurement import meter as meter_module
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.values.measurement import Measurement
from tests.fake_statistics import FakeStatistics


@pytest.fixture
def device() -> FakeStatistics:
    return FakeStatistics()


@pytest.fixture
def ledger() -> FixtureRecords:
    return FixtureRecords()


def fixture(name: str) -> Any:
    """Return a stand-in for pytest's FixtureDef."""
    return SimpleNamespaceByIdentity(argname=name, cached_result=None)


class SimpleNamespaceByIdentity(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]  # as a FixtureDef


def measured(meter: Meter, fixtures: tuple[Any, ...] = (), *, passed: bool = True) -> Measurement:
    return meter.measurements(fixtures, [], device=0, passed=passed)[0]


def test_a_body_is_charged_for_what_it_allocates(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    device.allocate(1000)
    meter = Meter(device, ledger)
    with meter.running([]):
        device.use(300)
        device.use(200)

    assert measured(meter) == Measurement(
        device="cuda:0",
        simulated=False,
        peak_allocated=300,
        peak_reserved=1000,
        allocated_before=0,
        allocated_after=0,
        leaked=0,
        cublas_workspace=0,
        stray=1000,
        phases=measured(meter).phases,
    )


def test_memory_a_body_leaves_is_leaked(device: FakeStatistics, ledger: FixtureRecords) -> None:
    meter = Meter(device, ledger)
    with meter.running([]):
        device.allocate(30)

    result = measured(meter)
    assert (result.leaked, result.allocated_after) == (30, 30)


def test_a_failed_body_is_not_said_to_leak(device: FakeStatistics, ledger: FixtureRecords) -> None:
    meter = Meter(device, ledger)
    with pytest.raises(RuntimeError), meter.running([]):
        device.allocate(30)
        raise RuntimeError

    result = measured(meter, passed=False)
    assert (result.leaked, result.peak_allocated) == (None, 30)


class InCycle:
    """An object in a reference cycle that holds memory until it is collected."""

    def __init__(self, device: FakeStatistics, size: int) -> None:
        self._device = device
        self._address = device.allocate(size)
        self._cycle = self

    def __del__(self) -> None:
        self._device.free(self._address)


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_automatic_collection")
def test_garbage_in_cycles_is_not_leaked(device: FakeStatistics, ledger: FixtureRecords) -> None:
    meter = Meter(device, ledger)
    with meter.running([]):
        InCycle(device, 30)

    result = measured(meter)
    assert (result.leaked, result.allocated_after) == (0, 0)


@pytest.mark.usefixtures("no_automatic_collection")
def test_garbage_in_cycles_is_not_held_by_a_fixture(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    model = fixture("model")
    meter = Meter(device, ledger)
    with meter.setting_up(model):
        device.allocate(100)
        InCycle(device, 30)

    assert ledger.held([model])[0].allocated == 100


@pytest.mark.usefixtures("no_automatic_collection")
def test_a_body_s_garbage_is_not_subtracted_from_a_fixture_it_requests(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    late = fixture("late")
    meter = Meter(device, ledger)
    with meter.running([]):
        InCycle(device, 30)
        with meter.setting_up(late):
            device.allocate(100)

    assert ledger.held([late])[0].allocated == 100


def test_garbage_is_collected_only_where_memory_is_unexplained(
    device: FakeStatistics, ledger: FixtureRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    collections: list[None] = []
    monkeypatch.setattr(meter_module, "collect_garbage", lambda: collections.append(None))

    def run(*kept: int) -> None:
        meter = Meter(device, ledger)
        with meter.running([]):
            device.use(10)
            for size in kept:
                device.allocate(size)
        measured(meter)

    run()
    assert len(collections) == 0
    run(5)
    assert len(collections) == 1  # to decide whether memory is leaked
    run()
    assert len(collections) == 2  # to decide whether the memory still exists
    run()
    assert len(collections) == 2


def test_workspaces_are_recognised_and_are_not_leaked(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    meter = Meter(device, ledger)
    with meter.running([]):
        with meter.tracker.window("first"):
            device.allocate(64, workspace=True)
        with meter.tracker.window("second"):
            device.allocate(32, workspace=True)

    result = measured(meter)

    assert (result.cublas_workspace, result.peak_allocated, result.leaked) == (96, 96, 0)
    sizes = {name: phase.cublas_workspace for name, phase in result.phases.items()}
    assert sizes == {"setup": 0, "call": 96, "first": 64, "second": 96}


def test_a_body_starts_without_workspaces_of_earlier_tests(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    device.allocate(64, workspace=True)
    meter = Meter(device, ledger)
    with meter.running([]):
        assert device.allocated == 0


def test_fixtures_of_the_test_are_charged_and_others_are_not(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    own, stranger = fixture("own"), fixture("stranger")
    earlier = Meter(device, ledger)
    with earlier.setting_up(own):
        device.allocate(100)
    with earlier.setting_up(stranger):
        device.allocate(2000)

    meter = Meter(device, ledger)
    with meter.running([own]):
        device.use(7)

    result = measured(meter, (own,))
    assert (result.allocated_before, result.peak_allocated) == (100, 107)
    assert result.stray == 2000
    assert result.phases["setup"].peak_allocated == 100


@pytest.mark.parametrize("earlier", [False, True])
def test_a_fixture_that_the_body_requests_counts_from_the_start(
    device: FakeStatistics, ledger: FixtureRecords, earlier: bool
) -> None:
    late = fixture("late")

    def set_up(meter: Meter) -> None:
        with meter.setting_up(late):
            device.use(500)
            device.allocate(100)

    if earlier:
        set_up(Meter(device, ledger))
    meter = Meter(device, ledger)
    with meter.running([]):
        device.use(40)
        if not earlier:
            set_up(meter)
        device.use(7)

    result = meter.measurements([late], [], device=0, passed=True)[0]
    assert (result.allocated_before, result.peak_allocated, result.allocated_after) == (
        100,
        140,
        100,
    )
    assert result.stray == 0


def test_the_last_run_counts_with_memory_that_earlier_runs_left(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    device.allocate(1000)
    meter = Meter(device, ledger)
    for kept, used in ((50, 900), (0, 20)):
        with meter.running([]):
            device.use(used)
            if kept:
                device.allocate(kept)

    result = measured(meter)
    assert (result.allocated_before, result.peak_allocated, result.leaked) == (50, 70, 0)
    assert result.stray == 1000


def test_phases_can_be_read_while_the_body_runs(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    device.allocate(1000)
    meter = Meter(device, ledger)
    with meter.running([]):
        with meter.tracker.window("work"):
            device.use(30)
        assert meter.phases(0)["work"].peak_allocated == 30
        assert list(meter.phases(0)) == ["work"]


def test_a_device_that_was_not_used_has_a_measurement_of_zero(
    device: FakeStatistics, ledger: FixtureRecords
) -> None:
    meter = Meter(device, ledger)
    with meter.running([]):
        device.use(10)

    results = meter.measurements([], [], device=1, passed=True)

    assert {index: result.peak_allocated for index, result in results.items()} == {0: 10, 1: 0}
    assert results[1].device == "cuda:1"
