"""--gpumem-share and --gpumem-quota, in pytest runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from pytest_gpumem.sharing.ledger import Ledger, Stay
from tests.pytest_project import Project

GIB = 2**30
T4 = 15_828_320_256
"""Bytes of the simulated GPU."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


def stays(folder: Path) -> list[Stay]:
    ledger = Ledger(folder)
    found = ledger.stays()
    ledger.close()
    return found


def most(stays: Iterable[Stay], of_each: Callable[[Stay], int]) -> int:
    """Return the highest sum of ``of_each`` over the tests that ran at one moment."""
    changes = [(stay.released, -of_each(stay)) for stay in stays]
    changes += [(stay.granted, of_each(stay)) for stay in stays]
    return max(accumulate(change for _, change in sorted(changes)))


SEVERAL = """
    import time

    @pytest.mark.parametrize("size", [9, 8, 7, 1, 6, 5])
    @pytest.mark.gpumem(max_reserved="9GiB")
    def test_takes(size):
        x = torch.empty(size << 30, dtype=torch.uint8, device="cuda")
        time.sleep(0.05)
"""


def test_workers_take_turns_where_there_is_no_room_for_both(project: Project, folder: Path) -> None:
    project.write(test_it=SEVERAL)

    result = project.run_apart("--gpumem-share", "-n2")

    result.assert_outcomes(passed=6)
    found = stays(folder)
    # 9 GiB each by the marker: never two of them on 14.7.
    assert most(found, lambda stay: stay.bytes) == 9 * GIB
    assert len(found) == 6
    assert len({stay.worker for stay in found}) == 2
    result.stdout.fnmatch_lines(["note: simulated T4 cuda:0: 6 tests on 2 workers in * s, *"])


def test_an_unmarked_test_asks_for_no_memory(project: Project, folder: Path) -> None:
    project.write(test_it="def test_it(): pass")
    project.run("--gpumem-share").assert_outcomes(passed=1)
    assert not folder.exists()


def test_a_test_of_unknown_need_runs_alone(project: Project, folder: Path) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        def test_it():
            torch.ones(3, device="cuda")
        """
    )
    project.run("--gpumem-share").assert_outcomes(passed=1)
    assert [stay.bytes for stay in stays(folder)] == [0]


def test_the_need_of_a_test_is_that_of_its_baseline(project: Project, folder: Path) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        def test_it():
            torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    project.run("--gpumem-update-baselines").assert_outcomes(passed=1)
    project.run("--gpumem-share").assert_outcomes(passed=1)
    assert stays(folder)[0].bytes == 20 << 20


TWO = "--gpumem-device=sim:T4*2"


def last_grant(folder: Path) -> dict[str, int]:
    """Return the bytes by device of the last grant."""
    found = stays(folder)
    last = found[-1].nodeid, found[-1].granted
    return {one.device: one.bytes for one in found if (one.nodeid, one.granted) == last}


def test_a_test_that_uses_two_devices_asks_for_both(project: Project, folder: Path) -> None:
    both = {"simulated T4 cuda:0": 2 << 30, "simulated T4 cuda:1": 2 << 30}
    project.write(
        test_it="""
        @pytest.mark.gpumem(max_reserved="2GiB")
        def test_it():
            torch.ones(3, device="cuda:1")
        """
    )
    project.run("--gpumem-share", device=TWO, use=("cacheprovider",)).assert_outcomes(passed=1)
    assert last_grant(folder) == {"simulated T4 cuda:0": 2 << 30}, "the need is still unknown"
    project.run("--gpumem-share", device=TWO, use=("cacheprovider",)).assert_outcomes(passed=1)
    assert last_grant(folder) == both

    project.write(
        test_it="""
        @pytest.mark.gpumem(max_reserved="2GiB", gpu="T4*2")
        def test_says_so():
            torch.ones(3, device="cuda")
        """
    )
    project.run("--gpumem-share").assert_outcomes(passed=1)
    assert last_grant(folder) == both


def test_workers_spread_over_the_devices_of_a_machine(project: Project, folder: Path) -> None:
    project.write(
        test_it="""
        import time

        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.gpumem(max_reserved="12GiB")
        def test_takes(number):
            torch.empty(11 << 30, dtype=torch.uint8, device="cuda")
            time.sleep(0.2)
        """
    )

    result = project.run_apart("--gpumem-share", "-n2", device=TWO)

    result.assert_outcomes(passed=4)
    # 12 of 14.7 GiB: two at a time only because each worker has a device of its own.
    found = stays(folder)
    places = {(stay.worker, stay.device) for stay in found}
    assert len(places) == len({device for _, device in places}) == 2
    assert most(found, lambda _: 1) == 2


def test_no_test_needs_more_than_its_quota(project: Project, folder: Path) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(quota="1GiB")
        def test_unknown():
            torch.ones(3, device="cuda")

        @pytest.mark.gpumem(quota="1GiB", max="2GiB")
        def test_limited():
            torch.ones(3, device="cuda")
        """
    )
    project.run("--gpumem-share").assert_outcomes(passed=2)
    assert [stay.bytes for stay in stays(folder)] == [GIB] * 2


def test_a_test_that_never_fits_fails_with_its_need(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(max_reserved="16GiB")
        def test_it():
            pass
        """
    )
    result = project.run("--gpumem-share")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it needs 16.00 GiB by its max_reserved, and simulated T4 cuda:0 has * for tests"]
    )


def test_a_test_that_waits_too_long_names_the_holders(project: Project, folder: Path) -> None:
    from pytest_gpumem.sharing.admission import Budget

    project.write(
        test_it="""
        @pytest.mark.gpumem(max_reserved="9GiB")
        def test_it():
            pass
        """
    )
    ledger = Ledger(folder)
    worker = ledger.join("another", "gw7")
    name = "simulated T4 cuda:0"
    test = ledger.ask(worker, "test_theirs", {name: 10 * GIB})
    assert ledger.try_grant(test, {name: Budget(T4)}).granted

    result = project.run("--gpumem-share", "--gpumem-share-timeout=0.2")

    ledger.close()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it waited * s for 9.00 GiB: gw7 holds 10.00 GiB (test_theirs)"]
    )


QUOTA = """
    @pytest.mark.gpumem(quota="1GiB")
    def test_marked():
        torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="(1.00 GiB|1024.00 MiB) allowed"):
            torch.empty(3 << 29, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_plain():
        torch.empty(3 << 29, dtype=torch.uint8, device="cuda")
"""


def test_a_quota_holds_for_its_test(project: Project) -> None:
    project.write(test_it=QUOTA)
    project.run().assert_outcomes(passed=2)


@pytest.mark.parametrize("quota", ["1GiB", "6%"])
def test_a_quota_of_the_options_holds_for_every_test(project: Project, quota: str) -> None:
    project.write(test_it=QUOTA)
    project.run(f"--gpumem-quota={quota}").assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize("quota", ["", "0", "101%", "many", "-1GiB"])
def test_a_malformed_quota_is_refused(project: Project, quota: str) -> None:
    project.write(test_it=QUOTA)
    result = project.run_apart(f"--gpumem-quota={quota}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpumem-quota=* is not a quota; write a size like *"])
