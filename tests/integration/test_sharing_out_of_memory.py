"""Out of memory on a shared device: the cause that is named, and the outcome of the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from tests.pytest_project import Project

NEIGHBOUR = """
import psutil
import pytest
import torch
from pytest_gpumem.sharing.database import default_folder
from pytest_gpumem.sharing.database import Process
from pytest_gpumem.sharing.devices import SharedSimulatedDevice
from pytest_gpumem.simulated.gpu.catalogue import GPUS

GIB = 2**30
TOTAL = GPUS["T4"].total_memory


class Neighbour(SharedSimulatedDevice):
    '''Another process of the host that takes memory of the same GPU.'''

    def __init__(self):
        super().__init__(default_folder(), "simulated T4 cuda:0", TOTAL)
        self._process = Process(1, psutil.Process(1).create_time())


def take(gib):
    return torch.empty(int(gib * GIB), dtype=torch.uint8, device="cuda")


runs = []
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


def sharing_of(project: Project) -> dict[str, Any]:
    (test,) = json.loads((project.path / "report.json").read_text())["tests"]
    found: dict[str, Any] = test["sharing"]
    return found


def write(project: Project, body: str) -> None:
    project.write(neighbour=NEIGHBOUR, test_it=f"from neighbour import *\n{body}")


def test_a_test_crowded_out_by_a_neighbour_runs_once_more_alone(project: Project) -> None:
    write(
        project,
        """
@pytest.mark.gpumem(max_reserved="4GiB")
def test_it():
    runs.append(1)
    if len(runs) == 1:
        neighbour = Neighbour()
        assert neighbour.take(12 * GIB)
        try:
            kept = take(4)
        finally:
            neighbour.give_all()
    kept = take(4)
""",
    )
    result = project.run("--gpumem-share", "--gpumem-report=json:report.json")
    result.assert_outcomes(passed=1)
    assert sharing_of(project)["notes"] == [
        "run again alone: other processes held 12.00 GiB of the device when 4.00 GiB were asked for"
    ]


def test_a_body_that_handles_the_error_runs_again_too(project: Project) -> None:
    # Otherwise its numbers would be those of the smaller batch that a neighbour forced.
    write(
        project,
        """
@pytest.mark.gpumem(max_reserved="4GiB")
def test_it():
    runs.append(1)
    neighbour = Neighbour()
    if len(runs) == 1:
        assert neighbour.take(12 * GIB)
    try:
        kept = take(4)
    except torch.OutOfMemoryError:
        kept = take(1)
    finally:
        neighbour.give_all()
    assert len(runs) == 1 or kept.numel() == 4 * GIB
""",
    )
    result = project.run("--gpumem-share", "--gpumem-report=json:report.json")
    result.assert_outcomes(passed=1)
    assert len(sharing_of(project)["notes"]) == 1


def test_a_test_without_room_alone_blames_the_machine(project: Project) -> None:
    write(
        project,
        """
@pytest.mark.gpumem(max_reserved="4GiB")
def test_it():
    neighbour = Neighbour()
    assert neighbour.take(12 * GIB)
    runs.append(1)
    try:
        kept = take(4)
    finally:
        if len(runs) == 1:
            neighbour.give_all()
""",
    )
    result = project.run("--gpumem-share", "-p", "no:randomly")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "infrastructure error, not the test's: 4.00 GiB could not be allocated (0 B was "
            "reserved already), even when test_it.py::test_it ran alone: other processes held "
            "12.00 GiB (PID 1 (*) holds 12.00 GiB of simulated T4 cuda:0)"
        ]
    )


def test_a_test_over_its_quota_fails_with_the_excess(project: Project) -> None:
    write(
        project,
        """
@pytest.mark.gpumem(quota="2GiB")
def test_it():
    runs.append(1)
    assert len(runs) == 1
    kept = take(1.5)
    more = take(1)
""",
    )
    result = project.run("--gpumem-share")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "over its quota: 1.00 GiB asked for with 1.50 GiB reserved is 512.0 MiB over the quota "
            "of 2.00 GiB",
            "out of memory: 1.00 GiB asked for by neighbour.py:*",
            "  1.50 GiB  other  neighbour.py:*",
        ]
    )


def test_a_test_over_the_device_fails_without_another_run(project: Project) -> None:
    write(
        project,
        """
@pytest.mark.gpumem
def test_it():
    runs.append(1)
    assert len(runs) == 1
    take(16)
""",
    )
    result = project.run("--gpumem-share")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "over the device: 16.00 GiB asked for with 0 B reserved, and the device has 14.75 GiB "
            "for this process"
        ]
    )


ELASTIC = """
@pytest.mark.gpumem(quota="2GiB", max_reserved="2GiB", elastic=True)
def test_it():
    runs.append(1)
    kept = take({size})

def test_runs():
    assert len(runs) == {runs}
"""


@pytest.mark.parametrize(("size", "runs", "borrowed"), [(1, 1, 0), (3, 2, 2), (6, 2, 4), (9, 2, 7)])
def test_an_elastic_quota_grows_while_the_device_has_room(
    project: Project, size: int, runs: int, borrowed: int
) -> None:
    # Twice the quota, or the request if that is larger.
    write(project, ELASTIC.format(size=size, runs=runs).replace('max_reserved="2GiB", ', ""))
    project.run("--gpumem-share", "--gpumem-report=json:report.json", "-p", "no:randomly")
    assert sharing_of(project)["borrowed"] == borrowed << 30


def test_an_elastic_quota_ends_at_the_capacity_of_the_device(project: Project) -> None:
    write(project, ELASTIC.format(size=15, runs=1))
    result = project.run("--gpumem-share", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["over its quota: 15.00 GiB asked for with 0 B reserved is 13.00*"])


def test_without_a_ledger_a_quota_is_hard(project: Project) -> None:
    write(project, ELASTIC.format(size=3, runs=1))
    result = project.run("-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["over its quota: 3.00 GiB asked for with 0 B reserved is 1.00*"])


def test_child_processes_of_a_test_inherit_its_quota(project: Project) -> None:
    write(
        project,
        """
import subprocess, sys

@pytest.mark.gpumem(quota="2GiB")
def test_it():
    take(1)
    code = "import os; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    name, _, fraction = printed.strip().partition(":")
    assert name == "per_process_memory_fraction"
    assert int(float(fraction) * TOTAL) == 2 * GIB

@pytest.mark.gpumem
def test_after():
    take(1)
    import os
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
""",
    )
    project.run("-p", "no:randomly").assert_outcomes(passed=2)


def test_a_quota_is_not_part_of_a_baseline_s_key(project: Project) -> None:
    write(
        project,
        """
import os

@pytest.mark.gpumem(quota=os.environ.get("QUOTA", "3GiB"))
def test_it():
    take(1)
""",
    )
    project.run("--gpumem-update-baselines").assert_outcomes(passed=1)
    (folder,) = (project.path / "baselines").glob("[!.]*")
    assert "fraction" not in folder.name


FOREIGN = """
import sys, time
from pathlib import Path
from pytest_gpumem.sharing.devices import SharedSimulatedDevice
from pytest_gpumem.simulated.gpu.catalogue import GPUS

device = SharedSimulatedDevice(Path(sys.argv[1]), "simulated T4 cuda:0", GPUS["T4"].total_memory)
while not Path("collected").exists():
    time.sleep(0.01)
for _ in range(int(sys.argv[2])):
    while not device.take(10 << 30):
        time.sleep(0.01)
    Path("taken").touch()
    time.sleep(1)
    device.give(10 << 30)
    time.sleep(0.25)
time.sleep(600)
"""


def test_a_foreign_process_that_ends_fails_no_test(project: Project, folder: Path) -> None:
    project.write(
        foreign=FOREIGN,
        conftest="""
        import time
        from pathlib import Path

        def pytest_collection_finish():
            Path("collected").touch()
            while not Path("taken").exists():
                time.sleep(0.01)
        """,
        test_it="""
        import time

        @pytest.mark.gpumem(max_reserved="6GiB")
        @pytest.mark.parametrize("number", range(8))
        def test_it(number):
            for _ in range(4):
                x = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
                time.sleep(0.05)
                del x
                torch.cuda.empty_cache()
        """,
    )
    stranger = subprocess.Popen(
        [sys.executable, project.path / "foreign.py", folder, "2"], cwd=project.path
    )
    try:
        result = project.run_apart("--gpumem-share", "-n2", "--gpumem-report=json:report.json")
    finally:
        stranger.kill()
        stranger.wait()
    result.assert_outcomes(passed=8)
    tests = json.loads((project.path / "report.json").read_text())["tests"]
    waits = [test["sharing"]["waited_for"] for test in tests if test["sharing"]["waited_for"]]
    assert any(f"PID {stranger.pid} (" in wait for wait in waits)
