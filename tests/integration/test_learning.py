"""Needs and durations of tests that one run records for the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from pytest_gpumem.sharing.ledger import Ledger
from tests.pytest_project import Project

MIB, GIB = 2**20, 2**30
CACHE = ("cacheprovider",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


def learned(project: Project) -> dict[str, dict[str, Any]]:
    """Return the recorded needs by the start of an environment's key and the test's name."""
    path = project.path / ".pytest_cache" / "d" / "gpumem" / "learned.json"
    environments = json.loads(path.read_text())["environments"]
    return {
        key.partition("-torch")[0]: {
            nodeid.partition("::")[2]: lesson for nodeid, lesson in tests.items()
        }
        for key, tests in environments.items()
    }


SUITE = """
    import time

    @pytest.mark.gpumem
    def test_takes():
        torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        time.sleep(0.25)

    @pytest.mark.gpumem
    def test_fails():
        torch.ones(1, device="cuda")
        assert False

    @pytest.mark.gpumem
    @pytest.mark.xfail
    def test_fails_as_expected():
        torch.ones(1, device="cuda")
        assert False

    def test_plain():
        time.sleep(0.05)
"""


@pytest.mark.parametrize("workers", [(), ("-n2",), ("-n2", "--gpumem-share")])
def test_numbers_of_a_passing_test_are_recorded(project: Project, workers: tuple[str, ...]) -> None:
    project.write(test_it=SUITE)
    project.run_apart(*workers, use=CACHE)
    known = learned(project)
    assert known.keys() == {"", "sim-T4"}
    assert known["sim-T4"].keys() == {"test_takes"}
    assert known["sim-T4"]["test_takes"]["reserved"] == 20 * MIB
    assert known["sim-T4"]["test_takes"]["seconds"] >= 0.25
    assert known[""].keys() == {"test_plain"}
    assert known[""]["test_plain"]["seconds"] >= 0.05


def test_a_partial_run_keeps_the_records_of_other_tests(project: Project) -> None:
    project.write(test_it=SUITE)
    project.run("-ktest_takes", use=CACHE)
    before = learned(project)
    project.run("-ktest_plain", "--gpumem-share", use=CACHE)
    assert learned(project) == {**before, "": learned(project)[""]}


def test_a_project_without_marked_tests_records_nothing(project: Project) -> None:
    project.write(test_it="def test_it(): pass")
    project.run(use=CACHE)
    assert not (project.path / ".pytest_cache" / "d").exists()


def test_without_a_cache_nothing_is_recorded(project: Project) -> None:
    project.write(test_it=SUITE)
    project.run("--gpumem-share", "-ktest_takes").assert_outcomes(passed=1, deselected=3)
    assert not (project.path / ".pytest_cache").exists()


def test_a_cache_that_cannot_be_written_is_reported(project: Project) -> None:
    project.write(test_it=SUITE)
    (project.path / ".pytest_cache" / "d" / "gpumem" / "learned.json").mkdir(parents=True)
    result = project.run("-ktest_takes", use=CACHE)
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(["note: what tests took is not remembered: * was not written: *"])


def test_the_next_run_knows_what_a_test_needs(project: Project, folder: Path) -> None:
    project.write(test_it=SUITE)
    for _ in range(2):
        project.run("--gpumem-share", "-ktest_takes", use=CACHE).assert_outcomes(
            passed=1, deselected=3
        )
    ledger = Ledger(folder)
    granted = [stay.bytes for stay in ledger.stays()]
    ledger.close()
    # In the first run its need was unknown, so it ran alone.
    assert granted == [0, 20 * MIB]


BESIDE = """
    import time

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.gpumem(max_reserved="1GiB", exclusive=EXCLUSIVE)
    def test_it(number):
        torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        # Until the other has begun, too: where both may run at once they do.
        (pathlib := __import__("pathlib")).Path(f"{number}").touch()
        end = time.time() + WAIT
        while not pathlib.Path(f"{1 - number}").exists() and time.time() < end:
            time.sleep(0.01)
        time.sleep(0.2)
"""


def test_a_duration_beside_other_tests_is_marked_and_not_recorded(project: Project) -> None:
    project.write(test_it=BESIDE.replace("EXCLUSIVE", "False").replace("WAIT", "60"))
    tests = project.report("--gpumem-share", "-n2", apart=True, use=CACHE)
    assert [test["beside"] for test in tests.values()] == [1, 1]
    assert all(test["duration"] >= 0.2 for test in tests.values())
    known = learned(project)["sim-T4"]
    # Reserved bytes do not depend on the tests beside them.
    assert known == {f"test_it[{number}]": {"reserved": 20 * MIB} for number in (0, 1)}


def test_a_duration_of_a_test_alone_on_its_device_is_recorded(project: Project) -> None:
    project.write(test_it=BESIDE.replace("EXCLUSIVE", "True").replace("WAIT", "0"))
    tests = project.report("--gpumem-share", "-n2", apart=True, use=CACHE)
    assert [test["beside"] for test in tests.values()] == [0, 0]
    for lesson in learned(project)["sim-T4"].values():
        assert lesson["seconds"] >= 0.2


def test_a_run_without_sharing_counts_no_tests_beside(project: Project) -> None:
    project.write(test_it=SUITE)
    (test,) = project.report("-ktest_takes", use=CACHE).values()
    assert "beside" not in test
    assert test["duration"] >= 0.25
