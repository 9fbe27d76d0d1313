"""Of thousands of tests most time lines are thinned, and no peak is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.attribution.timeline import thin_timeline
from pytest_gpumem.report.json_report import MOST_WHOLE, SAMPLES, thin
from pytest_gpumem.report.record import TestRecord
from tests.report.example_run import MIB, failing, measured, record

COUNT = 400


def line(peak_at: int) -> dict[str, Any]:
    """Rises by 1 with each sample, with one far higher sample at ``peak_at``."""
    held = [index if index != peak_at else 10_000 for index in range(COUNT)]
    return {
        "events": COUNT,
        "positions": list(range(COUNT)),
        "categories": {"activations": held, "other": [1] * COUNT},
        "places": [],
        "blocks": [[-1, 0]] * COUNT,
        "phases": [["forward", 10, 20]],
        "reserved": held,
    }


def test_first_last_peak_and_the_peak_of_each_phase_are_kept() -> None:
    found = thin_timeline(line(123), 20)
    positions = found["positions"]
    assert {0, 20, 123, COUNT - 1} <= set(positions)
    assert len(positions) <= 20 + 3
    assert found["categories"]["activations"][positions.index(123)] == 10_000
    series = [found["blocks"], found["reserved"], *found["categories"].values()]
    assert {len(values) for values in series} == {len(positions)}
    assert "split" not in found


def test_a_short_line_stays_as_it_is() -> None:
    assert thin_timeline(line(5), COUNT) == line(5)


def timed(name: str, peak: int) -> TestRecord:
    return record(name, replace(measured(peak), timeline=line(5)))


def samples(test: TestRecord) -> int:
    assert test.measurement is not None
    assert test.measurement.timeline is not None
    return len(test.measurement.timeline["positions"])


def test_failures_and_the_highest_peaks_keep_whole_lines() -> None:
    low = replace(failing(), measurement=replace(measured(MIB), timeline=line(5)))
    many = [timed(f"test_{number}", (number + 1) * MIB) for number in range(MOST_WHOLE + 10)]
    found = thin([low, *many])
    assert samples(found[0]) == COUNT
    assert [samples(test) for test in found[-(MOST_WHOLE - 1) :]] == [COUNT] * (MOST_WHOLE - 1)
    assert all(samples(test) <= SAMPLES + 3 for test in found[1:12])


def test_a_small_run_keeps_all() -> None:
    many = [timed(f"test_{number}", MIB) for number in range(MOST_WHOLE)]
    assert thin(many) == many
