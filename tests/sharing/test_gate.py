"""The gate, with a fake device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_gpumem.sharing.admission import Need
from pytest_gpumem.sharing.database import SharingError
from pytest_gpumem.sharing.gate import Gate
from pytest_gpumem.sharing.ledger import Ledger


@dataclass
class Gpu:
    name: str = "gpu"
    capacity: int = 100
    processes: dict[int, int] = field(default_factory=dict)

    def taken(self) -> Mapping[int, int]:
        return self.processes


def test_a_crowded_out_test_waits_until_another_program_stays_away(tmp_path: Path) -> None:
    # The program runs from 4 to 5 s and from 7 to 8 s; by 11 s, there was room for three seconds.
    ledger = Ledger(tmp_path)
    gpu = Gpu()
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        gpu.processes = {1: 20} if 4 <= now[0] < 5 or 7 <= now[0] < 8 else {}

    pass_time(4.5)
    gate = Gate(
        ledger,
        ledger.join("run", "gw0"),
        [gpu],
        held=lambda name: (0, 0),
        tear_down_fixtures=lambda: None,
        patience=60.0,
        clock=lambda: now[0],
        sleep=pass_time,
    )
    with gate.admitted("test_it", Need(90, "max", exclusive=True, quiet_seconds=3.0)) as admission:
        assert now[0] == pytest.approx(11.0, abs=0.2)
        assert "holds 20 B of gpu" in admission.waited_for
    with gate.admitted("test_it", Need(90, "max")):
        assert now[0] == pytest.approx(11.0, abs=0.2)
    ledger.close()


def test_fixtures_that_keep_their_memory_are_torn_down_once(tmp_path: Path) -> None:
    # Both hold 50 and need 90. The later one has to tear its fixtures down, but has leaked their
    # memory: it waits, and in the end names the holder.
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
        tear_down_fixtures=lambda: torn_down.append("torn down"),
        patience=1.0,
        clock=lambda: now[0],
        sleep=pass_time,
    )
    with (
        pytest.raises(SharingError, match=r"test_second waited 1 s for 90 B: "),
        gate.admitted("test_second", Need(90, "max")),
    ):
        raise AssertionError("it must not run")
    assert torn_down == ["torn down"]
    ledger.close()
