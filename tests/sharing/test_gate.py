"""The gate, with a device that the test invents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_gpumem.sharing.gate import Gate, NotAdmittedError
from pytest_gpumem.sharing.ledger import Ledger
from pytest_gpumem.sharing.need import Need


@dataclass
class Gpu:
    name: str = "gpu"
    capacity: int = 100
    processes: dict[int, int] = field(default_factory=dict)

    def taken(self) -> Mapping[int, int]:
        return self.processes


def test_fixtures_that_do_not_go_are_torn_down_once(tmp_path: Path) -> None:
    # Both hold 50 and want 90. The one that came later is to give way, and has leaked what it
    # holds: it waits, and in the end it says for whom.
    ledger = Ledger(tmp_path)
    first, second = (ledger.join("run", name) for name in ("gw0", "gw1"))
    ledger.hold(first, "gpu", context=0, fixtures=50)
    ledger.hold(second, "gpu", context=0, fixtures=50)
    ledger.ask(first, "test_first", {"gpu": 40})
    torn_down: list[str] = []
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    gate = Gate(
        ledger,
        second,
        [Gpu()],
        held=lambda name: (0, 50),
        tidy=lambda: torn_down.append("torn down"),
        patience=1.0,
        clock=lambda: now[0],
        sleep=pass_time,
    )
    with (
        pytest.raises(NotAdmittedError, match=r"test_second waited 1 s for 90 B: "),
        gate.admitted("test_second", Need(90, "max")),
    ):
        raise AssertionError("it must not run")
    assert torn_down == ["torn down"]
    ledger.close()
