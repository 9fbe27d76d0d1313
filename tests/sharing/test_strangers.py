"""Attribution of a device's memory to processes, computed by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_gpumem.sharing.admission import Budget
from pytest_gpumem.sharing.database import UNKNOWN_PROCESS, SharingError
from pytest_gpumem.sharing.devices import NvmlDevice
from pytest_gpumem.sharing.gate import Gate, claims_of, without_claimed
from pytest_gpumem.sharing.ledger import Ledger
from tests.fake_nvml import GIB, MACHINES, MIB, FakeNvml, Gpu, found, process

ME = os.getpid()


def taken(nvml: FakeNvml) -> Mapping[int, int]:
    with found(nvml):
        return NvmlDevice(0).taken()


@pytest.mark.parametrize(
    ("taken", "claims", "rest"),
    [
        ({1: 50, 2: 30}, {1: 60}, 0),
        # Unattributed bytes belong to hidden workers, up to their claims.
        ({UNKNOWN_PROCESS: 50}, {1: 20, 2: 10}, 20),
        ({UNKNOWN_PROCESS: 25}, {1: 20, 2: 10}, 0),
        # A worker that the driver lists has no share of them.
        ({1: 20, UNKNOWN_PROCESS: 25}, {1: 20, 2: 10}, 15),
        ({1: 20, 3: 7, UNKNOWN_PROCESS: 25}, {1: 20}, 25),
    ],
)
def test_unclaimed_bytes_remain(taken: dict[int, int], claims: dict[int, int], rest: int) -> None:
    assert without_claimed(taken, claims) == {**taken, UNKNOWN_PROCESS: rest}


def test_a_worker_claims_its_held_and_granted_bytes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    worker = ledger.join("run", "gw0")
    ledger.hold(worker, "gpu", context=3, fixtures=4)
    test = ledger.ask(worker, "test", {"gpu": 20})
    devices = {"gpu": Budget(100)}
    assert claims_of(ledger.state(devices), "gpu", ledger.owners()) == {ME: 7}
    assert ledger.try_grant(test, devices).granted
    assert claims_of(ledger.state(devices), "gpu", ledger.owners()) == {ME: 27}
    ledger.close()


def test_a_listed_process_has_the_bytes_that_the_driver_lists() -> None:
    gpu = Gpu(used=6 * GIB, compute=[process(ME, 2 * GIB), process(1, 3 * GIB)])
    assert taken(FakeNvml(gpu)) == {ME: 2 * GIB, 1: 3 * GIB, UNKNOWN_PROCESS: GIB}


@pytest.mark.parametrize(
    ("machine", "used"),
    [
        ("docker", 12_614 * MIB),
        ("docker without processes", 7_325 * MIB),
        ("hami", 500 * MIB),
    ],
)
def test_in_a_container_all_bytes_are_unattributed(machine: str, used: int) -> None:
    assert taken(MACHINES[machine].nvml()) == {UNKNOWN_PROCESS: used}


def test_processes_without_bytes_leave_them_unattributed() -> None:
    assert taken(FakeNvml(Gpu(compute=[process(ME, None)]))) == {UNKNOWN_PROCESS: 6 * GIB}


def test_pids_are_foreign_where_the_own_process_is_not_listed() -> None:
    nvml = FakeNvml(Gpu(used=6 * GIB, compute=[process(1, 3 * GIB)]))
    uses: list[bool] = []
    with found(nvml):
        shared = NvmlDevice(0, has_context=lambda: bool(uses))
        assert shared.taken() == {1: 3 * GIB, UNKNOWN_PROCESS: 3 * GIB}
        uses.append(True)
        assert shared.taken() == {UNKNOWN_PROCESS: 6 * GIB}


@pytest.mark.parametrize(
    ("machine", "limit"),
    [
        ("cgroup", 10 * GIB),
        ("hami", 3_000 * MIB),
        # 6 of the 15 parts into which the card's 15,109 MiB are divided.
        ("cgpu", round(15_109 * MIB * 6 / 15)),
    ],
)
def test_a_limit_of_the_container_is_the_capacity(machine: str, limit: int) -> None:
    with found(MACHINES[machine].nvml(), MACHINES[machine].environ):
        assert NvmlDevice(0).capacity == round(limit * 0.98)


def test_own_memory_that_is_unattributed_is_not_another_program_s(tmp_path: Path) -> None:
    # The worker's context is part of 12,614 MiB that no process of this container has.
    ledger = Ledger(tmp_path)
    worker = ledger.join("run", "gw0")
    with found(MACHINES["docker"].nvml()):
        shared = NvmlDevice(0)
        gate = Gate(
            ledger,
            worker,
            [shared],
            held=lambda name: (600 * MIB, 400 * MIB),
            tear_down_fixtures=lambda: None,
            patience=1.0,
        )
        gate.declare()
        assert gate.view()[shared.name].foreign == 11_614 * MIB
    ledger.close()


def test_a_value_that_nvml_lacks_is_one_sentence() -> None:
    nvml = FakeNvml()
    refused = pytest.raises(SharingError, match=r"needs NVML .*: the GPU has fallen off the bus")
    with found(nvml):
        shared = NvmlDevice(0)
        nvml.gpus[0].errors["memory"] = 15
        with refused:
            shared.taken()
