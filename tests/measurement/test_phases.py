"""Phases and their peaks, on a fake device."""

from __future__ import annotations

from threading import Thread

import pytest

from pytest_gpumem.measurement.phases import (
    SNAPSHOTS_OF_EACH_ENTRY,
    NestingError,
    PhaseTracker,
)
from pytest_gpumem.measurement.statistics import Bytes
from pytest_gpumem.values.measurement import CALL, PhaseRecord
from tests.fake_statistics import FakeStatistics

NO_STRAY = Bytes()


@pytest.fixture
def device() -> FakeStatistics:
    return FakeStatistics()


@pytest.fixture
def tracker(device: FakeStatistics) -> PhaseTracker:
    return PhaseTracker(device)


def record(tracker: PhaseTracker, name: str, stray: Bytes = NO_STRAY) -> PhaseRecord:
    return tracker.records(0, stray)[name]


def test_a_phase_records_its_peak_and_the_bytes_before_and_after(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    device.allocate(100)
    device.use(900)
    with tracker.window("work"):
        device.use(50)
        device.allocate(20)
    device.use(700)

    assert record(tracker, "work") == PhaseRecord(
        name="work",
        peak_allocated=150,
        peak_reserved=1000,
        allocated_before=100,
        allocated_after=120,
    )


def test_stray_bytes_are_subtracted(device: FakeStatistics, tracker: PhaseTracker) -> None:
    device.allocate(1500)
    with tracker.window("work"):
        device.use(100)

    charged = record(tracker, "work", Bytes(allocated=1400, reserved=1000))

    assert (charged.peak_allocated, charged.peak_reserved) == (200, 1000)
    assert (charged.allocated_before, charged.allocated_after) == (100, 100)


def test_a_parent_s_peak_includes_the_peaks_of_its_children(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("outer"):
        device.use(10)
        with tracker.window("inner"):
            device.use(500)
        with tracker.window("later"):
            device.use(30)

    peaks = {name: phase.peak_allocated for name, phase in tracker.records(0, NO_STRAY).items()}
    assert peaks == {"outer": 500, "inner": 500, "later": 30}
    assert record(tracker, "inner").parent == "outer"


def test_a_phase_under_two_parents_has_none(device: FakeStatistics, tracker: PhaseTracker) -> None:
    for parent in ("first", "second"):
        with tracker.window(parent), tracker.window("shared"):
            pass

    assert record(tracker, "shared").parent is None


def test_the_record_of_a_phase_spans_all_its_entries(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    for kept, used in ((1, 10), (2, 40), (3, 20)):
        with tracker.window("work"):
            device.use(used)
            device.allocate(kept)

    work = record(tracker, "work")
    assert (work.entered, work.peak_allocated) == (3, 41)
    assert (work.allocated_before, work.allocated_after) == (0, 6)


def test_a_phase_within_one_of_the_same_name_does_not_begin(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("work"):
        with tracker.window("work"):
            device.use(10)
        device.use(20)

    assert (record(tracker, "work").entered, record(tracker, "work").peak_allocated) == (1, 20)


def test_leaving_a_phase_ends_phases_still_open_inside(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("outer"):
        forgotten = tracker.enter("forgotten")
        device.use(10)
    device.use(100)
    assert forgotten is not None
    tracker.leave(forgotten)

    assert record(tracker, "forgotten").peak_allocated == 10
    assert record(tracker, "outer").peak_allocated == 10


def test_overlapping_phases_are_refused(device: FakeStatistics, tracker: PhaseTracker) -> None:
    outer, inner = tracker.window("outer"), tracker.window("inner")
    outer.__enter__()
    inner.__enter__()
    device.use(10)

    with pytest.raises(NestingError, match=r"'outer' was left while 'inner'.* leave 'inner' first"):
        outer.__exit__(None, None, None)
    device.use(100)
    inner.__exit__(None, None, None)

    assert record(tracker, "inner").peak_allocated == 10


def test_an_exception_is_not_hidden_by_phases_it_leaves_open(tracker: PhaseTracker) -> None:
    inner = tracker.window("inner")

    with pytest.raises(RuntimeError, match="the test's"), tracker.window("outer"):
        inner.__enter__()
        raise RuntimeError("the test's")


def test_phases_that_a_body_leaves_open_end_with_it(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    forgotten = tracker.window("forgotten")
    with tracker.window(CALL):
        forgotten.__enter__()
        device.use(10)
    tracker.restart()
    with tracker.window(CALL):
        forgotten.__exit__(None, None, None)
        device.use(30)

    assert record(tracker, CALL).peak_allocated == 30


def test_phases_of_two_threads_do_not_nest(device: FakeStatistics, tracker: PhaseTracker) -> None:
    theirs = tracker.window("theirs")
    entering = Thread(target=theirs.__enter__)
    with tracker.window("mine"):
        entering.start()
        entering.join()
        device.use(10)
    device.use(100)
    theirs.__exit__(None, None, None)

    assert record(tracker, "mine").peak_allocated == 10
    assert (record(tracker, "theirs").peak_allocated, record(tracker, "theirs").parent) == (
        100,
        None,
    )


def test_an_open_phase_has_no_record_yet(tracker: PhaseTracker) -> None:
    with tracker.window("work"):
        assert tracker.records(0, NO_STRAY) == {}


def test_a_phase_left_by_an_exception_ends_there(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with pytest.raises(RuntimeError), tracker.window("work"):
        device.use(10)
        raise RuntimeError
    device.use(100)

    assert record(tracker, "work").peak_allocated == 10


def test_workspaces_at_the_end_of_a_phase_are_found_by_their_blocks(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("before"):
        device.allocate(7)
    with tracker.window("within"):
        device.allocate(64, workspace=True)
    before = device.live_blocks()
    device.clear_workspaces()

    records = tracker.records(0, NO_STRAY, before - device.live_blocks())

    assert (records["before"].cublas_workspace, records["within"].cublas_workspace) == (0, 64)


def test_snapshots_of_a_phase_become_rarer_with_its_entries(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    for _ in range(100):
        with tracker.window("work"):
            pass

    assert device.snapshots == SNAPSHOTS_OF_EACH_ENTRY + len((16, 32, 64))


def test_a_change_of_workspace_pools_causes_another_snapshot(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    device.counts_pools = True
    kept = [device.allocate(100)]
    for _ in range(3):
        with tracker.window("work"):
            device.use(50)
    assert device.snapshots == 1

    with tracker.window("work"):
        kept.append(device.allocate(64, workspace=True))
    before = device.live_blocks()
    device.clear_workspaces()

    records = tracker.records(0, NO_STRAY, before - device.live_blocks())
    assert records["work"].cublas_workspace == 64


def test_a_restart_keeps_entries_from_before_the_first_start(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("load"):
        device.use(10)
    for used in (500, 30):
        tracker.restart()
        with tracker.window("load"), tracker.window("work"):
            device.use(used)

    assert record(tracker, "load").entered == 2
    assert record(tracker, "load").peak_allocated == 30
    assert record(tracker, "work").peak_allocated == 30


def test_memory_of_an_excluded_set_up_counts_from_the_beginning(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    with tracker.window("early"):
        device.use(5)
    with tracker.window("work"):
        device.use(10)
        with tracker.exclude(lambda: {0: Bytes(allocated=100)}):
            device.use(900)
            device.allocate(100)
        device.use(20)

    early, work = record(tracker, "early"), record(tracker, "work")
    assert (early.allocated_before, early.peak_allocated, early.allocated_after) == (100, 105, 100)
    assert (work.allocated_before, work.peak_allocated, work.allocated_after) == (100, 120, 100)


def test_a_device_first_seen_within_a_phase_was_empty_before(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    harvest, readings = device.read_and_reset_peaks, dict(device.read_and_reset_peaks())
    readings.clear()
    device.read_and_reset_peaks = lambda: readings  # type: ignore[method-assign]  # CUDA is not initialised
    phase = tracker.enter("work")
    device.read_and_reset_peaks = harvest  # type: ignore[method-assign]
    device.allocate(30)
    assert phase is not None
    tracker.leave(phase)

    work = record(tracker, "work")
    assert (work.allocated_before, work.peak_allocated, work.allocated_after) == (0, 30, 30)


def test_phases_may_be_entered_from_several_threads(
    device: FakeStatistics, tracker: PhaseTracker
) -> None:
    def work(name: str) -> None:
        for _ in range(50):
            with tracker.window(name):
                pass

    threads = [Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(tracker.records(0, NO_STRAY)) == {"one", "two"}
