"""A run's use of its device, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.sharing.ledger import Stay
from pytest_gpumem.sharing.usage import RunUsage, lines, usages, waits

STAYS = [
    Stay("run", "gw1", "b", "gpu", 10, 12, 40),
    Stay("another", "gw9", "x", "gpu", 11, 13, 1),
    Stay("run", "gw0", "a", "gpu", 10, 14, 60),
    Stay("run", "gw0", "c", "gpu", 14, 16, 80),
]


@pytest.fixture
def usage() -> RunUsage:
    (usage,) = usages(STAYS, "run", 100)
    return usage


def test_makespan_and_peak_of_a_run(usage: RunUsage) -> None:
    assert (usage.makespan, usage.workers, usage.peak) == (6, 2, 100)


def test_the_bound_is_the_tightest_of_three(usage: RunUsage) -> None:
    # Longest 4 s; 8 s on 2 workers 4 s; (60 * 4 + 40 * 2 + 80 * 2) / 100 = 4.8 s on the device.
    assert usage.bound == pytest.approx(4.8)


def test_the_bars_show_the_mean_of_each_interval(usage: RunUsage) -> None:
    # 100 % for 2 s, 60 % for 2 s, 80 % for 2 s.
    assert usage.picture(6) == "██▅▅▇▇"
    assert usage.picture(3) == "█▅▇"


def test_the_text_for_a_terminal(usage: RunUsage) -> None:
    assert lines([usage])[0] == (
        "gpu: 3 tests on 2 workers in 6.0 s, 1.25 x the 4.8 s that no order can beat"
    )


def test_the_text_about_waits() -> None:
    def test(
        waited: float, waited_for: str | None, borrowed: int = 0, *notes: str
    ) -> dict[str, Any]:
        return {"waited": waited, "waited_for": waited_for, "borrowed": borrowed, "notes": notes}

    assert waits({"test_a": test(0.1, None)}) == []
    assert waits(
        {
            "test_a": test(2.0, "gw0 holds 3 GiB (test_b)"),
            "test_b": test(1.0, None, 1 << 30),
            "test_c": test(0.0, None, 0, "run again alone: other processes held 1.0 GiB"),
        }
    ) == [
        "2 tests waited 3.0 s in all for memory; longest test_a, 2.0 s: gw0 holds 3 GiB (test_b)",
        "test_b borrowed 1.00 GiB above its quota",
        "test_c was run again alone: other processes held 1.0 GiB",
    ]


def test_the_json_form_counts_seconds_from_the_first_test(usage: RunUsage) -> None:
    data = usage.to_dict()
    assert (data["device"], data["capacity"]) == ("gpu", 100)
    assert [tuple(span.values()) for span in data["spans"]] == [
        ("a", "gw0", 0, 4, 60),
        ("b", "gw1", 0, 2, 40),
        ("c", "gw0", 4, 6, 80),
    ]
