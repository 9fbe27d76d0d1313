"""The number of workers that ``-n auto`` starts."""

from __future__ import annotations

import sys

import pytest

from pytest_gpumem.device import host_gpus
from pytest_gpumem.session.placement import Room, fitting
from tests.fake_nvml import MACHINES
from tests.pytest_project import Project

GIB = 2**30


@pytest.mark.parametrize(
    ("rooms", "needs", "workers"),
    [
        # 32 / (1 + 6): four contexts and four tests of the mean size.
        ([Room(32, 1)], [4, 8], 4),
        ([Room(32, 1), Room(32, 1)], [4, 8], 8),
        # MIG instances get one worker each, whatever their size.
        ([Room(20, 1, most_workers=1), Room(5, 1, most_workers=1)], [1], 2),
        # At least one worker is started, to run the tests or to report that none fits.
        ([Room(2, 1)], [30], 1),
        # Tests of unknown need: only contexts count.
        ([Room(16, 2)], [], 8),
    ],
)
def test_as_many_workers_as_contexts_and_mean_tests_fit(
    rooms: list[Room], needs: list[float], workers: int
) -> None:
    assert fitting(rooms, needs) == workers


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 4)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)


@pytest.mark.parametrize(
    ("args", "workers"),
    [
        # 14.7 GiB divided by a test's known need; a mean of 20 MiB allows more than the cores.
        ((), 4),
        (("--gpumem-quota=7GiB",), 4),
        (("-o", "gpumem_max_reserved=6GiB"), 2),
        (("-o", "gpumem_max_reserved=6GiB", "--gpumem-quota=4GiB"), 3),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_auto_counts_workers_by_limits_baselines_and_quota(
    project: Project, args: tuple[str, ...], workers: int
) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        def test_it():
            torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    project.run("--gpumem-update-baselines").assert_outcomes(passed=1)
    result = project.run("--gpumem-share", "-nauto", "--collect-only", *args)
    result.stdout.fnmatch_lines(
        [f"gpumem: simulated T4; -n auto: {workers} of 4 cores' workers fit the memory; *"]
    )


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        # 40 GiB less the 2 % that stay free, and contexts of 600 MiB beside tests of 12 GiB.
        ("plain", 3),
        # The first is busy with 30 GiB: it has room for none, the second for three.
        ("two", 3),
        ("exclusive", 1),
        ("two exclusive", 2),
        # 20 and 10 GiB, and 5: the last two have no room for such a test.
        ("mig", 1),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_auto_counts_workers_by_the_free_memory_of_gpus(
    project: Project, machine: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", MACHINES[machine].nvml())
    monkeypatch.setattr(host_gpus, "DRIVERS", (__file__,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    project.write(test_it="def test_it(): pass")
    options = ("--gpumem-share", "-nauto", "--collect-only", "-o", "gpumem_max_reserved=12GiB")
    result = project.run(*options, device="--gpumem-device=auto")
    result.stdout.fnmatch_lines([f"*; -n auto: {workers} of 4 cores' workers fit the memory; *"])


@pytest.mark.usefixtures("four_cores")
def test_auto_is_left_to_xdist_without_sharing(project: Project) -> None:
    project.write(test_it="def test_it(): pass")
    result = project.run("-nauto", "--collect-only", "-o", "gpumem_max_reserved=6GiB")
    result.stdout.no_fnmatch_line("*fit the memory*")
