"""``gpumem gpus --watch``: the GPUs of this host and the tests that run, live."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.cli.gpus import device_lines, run_lines
from pytest_gpumem.sharing import watched
from pytest_gpumem.sharing.database import FOLDER_VARIABLE, Process, this_process
from tests.pytest_project import Project

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that only this test's runs and watchers share."""
    path = tmp_path / "shared"
    monkeypatch.setenv(FOLDER_VARIABLE, str(path))
    return path


RUN = watched.WatchedProcess(
    this_process(),
    "/home/me/project",
    "gw1",
    "simulated T4",
    finished=3,
    test="test_a.py::test_x",
    since=100.0,
    last="test_a.py::test_w",
    last_peak=98 * MIB,
)


def test_the_text_of_running_tests() -> None:
    idle = replace(RUN, worker="", finished=1, test=None, last=None)
    # The lines about GPUs are those of gpumem gpus.
    assert list(device_lines([], None, 80)) == ["no GPU"]
    assert list(run_lines([RUN, idle], 103.4)) == [
        f"pytest in /home/me/project (PID {os.getpid()}, worker gw1): 3 measured tests so far",
        "  runs  test_a.py::test_x  3 s on simulated T4",
        "  last  test_a.py::test_w  peak 98.0 MiB",
        f"pytest in /home/me/project (PID {os.getpid()}): 1 measured test so far",
    ]


def test_no_gpu_and_no_run_are_reported(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["gpus", "--watch", "0.01", "--once"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "no pytest has begun a measured test since this looks"
    assert not watched.is_watched(folder)


def test_runs_of_dead_processes_are_forgotten(folder: Path) -> None:
    dead = replace(RUN, process=Process(this_process().pid, 1.0))
    watched.show(folder, dead)
    assert watched.runs(folder) == []
    watched.show(folder, RUN)
    assert watched.runs(folder) == [RUN]
    (folder / watched.RUNS / "1.json").write_text('{"process": [1, 2]}')
    assert watched.runs(folder) == [RUN]
    watched.hide(folder)
    assert watched.runs(folder) == []


def test_a_watcher_that_was_killed_does_not_count(folder: Path) -> None:
    (folder / watched.WATCHERS).mkdir(parents=True)
    (folder / watched.WATCHERS / "999999999").touch()
    with watched.watching(folder):
        assert watched.is_watched(folder)
    assert not watched.is_watched(folder)


def test_an_interval_of_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--watch", "0"]) == 2
    assert "argument --watch: '0' is not a number of seconds above 0" in capsys.readouterr().err


def test_tests_are_shown_while_they_run(project: Project, folder: Path) -> None:
    project.write(
        test_it="""
        import json, subprocess, sys

        def seen():
            command = [sys.executable, "-m", "pytest_gpumem.cli", "gpus"]
            options = ["--once", "--json", "--watch", "0.01"]
            looked = subprocess.run([*command, *options], capture_output=True, check=True)
            [run] = json.loads(looked.stdout)["runs"]
            return run

        def test_first(gpumem):
            torch.empty(1 << 20, device="cuda")
            now = seen()
            assert (now["test"], now["device"]) == ("test_it.py::test_first", "simulated T4")

        def test_second(gpumem):
            now = seen()
            assert (now["finished"], now["last"]) == (1, "test_it.py::test_first")
            assert now["last_peak"] == 4 << 20
        """
    )
    with watched.watching(folder):
        project.run_apart().assert_outcomes(passed=2)
    assert watched.runs(folder) == []


def test_a_run_without_watchers_writes_nothing(project: Project, folder: Path) -> None:
    project.write(test_it="def test_it(gpumem): torch.empty(1, device='cuda')")
    project.run().assert_outcomes(passed=1)
    assert not (folder / watched.RUNS).exists()
