"""Opportunistic tests yield to guaranteed ones while they run, and are run again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from pytest_gpumem.sharing.ledger import Ledger
from tests.pytest_project import Project


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


TESTS = """
import pathlib
import time

begun = pathlib.Path("begun")

@pytest.mark.gpumem(max_reserved="9GiB", qos="opportunistic")
def test_that_yields():
    first = not begun.exists()
    begun.touch()
    kept = torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
    if first:
        time.sleep(120)

@pytest.mark.gpumem(max_reserved="9GiB")
def test_that_waits():
    kept = torch.empty(9 << 30, dtype=torch.uint8, device="cuda")

@pytest.fixture
def once_it_has_begun():
    while not begun.exists():
        time.sleep(0.05)
"""


def test_an_opportunistic_test_yields_and_is_run_again(project: Project, folder: Path) -> None:
    # Two separate pytest runs on one host.
    project.write(test_it=TESTS)
    first = project.start("--gpumem-share", "test_it.py::test_that_yields")
    while not (project.path / "begun").exists():
        assert first.poll() is None
    project.run_apart("--gpumem-share", "test_it.py::test_that_waits").assert_outcomes(passed=1)
    output, _ = first.communicate(timeout=60)
    assert "1 passed" in output.decode()

    ledger = Ledger(folder)
    stays = ledger.stays()
    ledger.close()
    order = [stay.nodeid.partition("::")[2] for stay in stays]
    assert order == ["test_that_yields", "test_that_waits", "test_that_yields"]
    assert all(stay.released <= later.granted for stay, later in pairwise(stays))


def test_an_opportunistic_test_yields_in_its_second_run_too(project: Project) -> None:
    tests = TESTS.replace("first = not begun.exists()", "first = len(runs()) < 2").replace(
        "    begun.touch()", "    pathlib.Path(f'begun{len(runs())}').touch()"
    )
    project.write(test_it=f"{tests}\ndef runs():\n    return list(pathlib.Path().glob('begun?'))\n")
    first = project.start("--gpumem-share", "test_it.py::test_that_yields")
    for number in range(2):
        while not (project.path / f"begun{number}").exists():
            assert first.poll() is None
        waits = project.run_apart("--gpumem-share", "test_it.py::test_that_waits")
        waits.assert_outcomes(passed=1)
    output, _ = first.communicate(timeout=60)
    assert "1 passed" in output.decode()
