"""The device that a worker gets, computed by hand and by processes that start at once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pytest_gpumem.measurement.nvml import NvmlReading, read_visible
from pytest_gpumem.option_values import Quota
from pytest_gpumem.session.placement import candidate_of, part_of_mps, visible
from pytest_gpumem.sharing.database import Database, Process, this_process
from pytest_gpumem.sharing.devices import CandidateDevice, least_loaded, take_place
from tests.fake_nvml import GIB, MACHINES, MIB, found, uuids

A, B, C = (Process(pid, 1.0) for pid in (11, 12, 13))


@pytest.mark.parametrize(
    ("candidates", "placed", "chosen"),
    [
        # Equal devices in turn.
        ([CandidateDevice("x", 80), CandidateDevice("y", 80)], {}, 0),
        ([CandidateDevice("x", 80), CandidateDevice("y", 80)], {"x": [A]}, 1),
        ([CandidateDevice("x", 80), CandidateDevice("y", 80)], {"x": [A], "y": [B]}, 0),
        # 80 / 3 is more than 24: the third worker still gets more on the large one.
        ([CandidateDevice("x", 80), CandidateDevice("y", 24)], {"x": [A, B]}, 0),
        ([CandidateDevice("x", 80), CandidateDevice("y", 24)], {"x": [A, B, C]}, 1),
        # Another program's 50 are unavailable; a placed worker's 70 are its own share.
        ([CandidateDevice("x", 80, {99: 50}), CandidateDevice("y", 80)], {}, 1),
        ([CandidateDevice("x", 80, {11: 70}), CandidateDevice("y", 30)], {"x": [A]}, 0),
        # MIG instances get one worker each, however small; then they are shared.
        (
            [CandidateDevice("x", 20, most_workers=1), CandidateDevice("y", 5, most_workers=1)],
            {"x": [A]},
            1,
        ),
        (
            [CandidateDevice("x", 20, most_workers=1), CandidateDevice("y", 5, most_workers=1)],
            {"x": [A], "y": [B]},
            0,
        ),
        # In exclusive mode a device takes one process.
        (
            [CandidateDevice("x", 80, most_workers=1, strict=True), CandidateDevice("y", 1)],
            {"x": [A], "y": [B]},
            1,
        ),
        ([CandidateDevice("x", 80, most_workers=1, strict=True)], {"x": [A]}, None),
    ],
)
def test_the_least_loaded_device_is_chosen(
    candidates: list[CandidateDevice], placed: dict[str, list[Process]], chosen: int | None
) -> None:
    assert least_loaded(candidates, placed) == chosen


def test_a_process_keeps_its_place_until_it_is_gone(tmp_path: Path) -> None:
    candidates = [CandidateDevice("x", 80), CandidateDevice("y", 80)]
    assert [take_place(tmp_path, candidates), take_place(tmp_path, candidates)] == [0, 0]
    # The parent of this process lives, and takes the other; a PID without a process is void.
    parent = Process(os.getppid(), _started(os.getppid()))
    assert take_place(tmp_path, candidates, parent) == 1
    assert take_place(tmp_path, candidates, Process(this_process().pid, 1.0)) == 0


def _started(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()


TAKE = """
import sys
from contextlib import closing
from pathlib import Path
from pytest_gpumem.sharing.devices import CandidateDevice, take_place

print(take_place(Path(sys.argv[1]), [CandidateDevice(name, 100) for name in "abc"]), flush=True)
sys.stdin.read()
"""


def test_processes_that_start_at_once_spread_over_the_devices(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(6)]
    try:
        chosen = [worker.stdout.readline().strip() for worker in workers if worker.stdout]
        assert sorted(chosen) == ["0", "0", "1", "1", "2", "2"]
        # A process that has ended leaves its place.
        workers[chosen.index("1")].communicate()
        assert take_place(tmp_path, [CandidateDevice(name, 100) for name in "abc"]) == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_new_ledger_opens_while_another_process_reads_it(tmp_path: Path) -> None:
    path, schema = tmp_path / "placed.sqlite3", "CREATE TABLE IF NOT EXISTS known (name)"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(schema)
        other.execute("BEGIN")
        other.execute("SELECT * FROM known").fetchall()

        with closing(Database(path, schema)) as opened:
            assert opened.execute("SELECT * FROM known").fetchall() == []


def _gpus(machine: str) -> list[NvmlReading]:
    with found(MACHINES[machine].nvml(), MACHINES[machine].environ):
        readings = read_visible()
    assert isinstance(readings, list)
    return readings


def _candidates(machine: str) -> list[CandidateDevice]:
    return list(map(candidate_of, _gpus(machine)))


def test_room_and_most_workers_of_machines() -> None:
    busy, idle = _candidates("two")
    assert (busy.room([]), idle.room([])) == (10 * GIB, 40 * GIB)
    assert [(one.most_workers, one.strict) for one in _candidates("mig")] == [(1, False)] * 3
    assert [(one.most_workers, one.strict) for one in _candidates("two exclusive")] == [
        (1, True)
    ] * 2
    assert [(one.most_workers, one.strict) for one in _candidates("mps")] == [(None, False)]
    assert [(one.most_workers, one.strict) for one in _candidates("prohibited")] == [(0, True)]
    assert _candidates("cgroup")[0].total == 10 * GIB


def test_cuda_visible_devices_begins_with_the_own_device() -> None:
    two, mig = _gpus("two"), _gpus("mig")
    first, second = uuids("two")
    assert visible(two[1], two) == f"{second},{first}"
    assert visible(mig[2], mig) == uuids("mig")[2]


def test_the_mps_limit_of_a_part_of_a_device() -> None:
    # A quarter of 80 GiB, and 600 MiB for the context.
    assert part_of_mps(Quota(share=0.25), 80 * GIB, 4) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=21080M",
    }
    assert part_of_mps(Quota(auto=True), 80 * GIB, 8)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"
    tiny = part_of_mps(Quota(bytes=MIB), 80 * GIB, 8)
    assert tiny["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "1"
