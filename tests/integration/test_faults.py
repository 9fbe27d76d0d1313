"""Faults after which a process can no longer use its GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from tests.pytest_project import Project


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


CONFTEST = """
# A simulated GPU has no kernels that could fail: this one's context is lost on request, for the
# process that asks.
import os
import pathlib
from pytest_gpumem.device.simulated import SimulatedDevice

ERROR = "CUDA error: device-side assert triggered"
lost = []
SimulatedDevice.fault = lambda device: ERROR if lost else None

@pytest.fixture
def cuda():
    x = torch.ones(3, device="cuda")
    if lost:
        raise RuntimeError(ERROR)
    return x
"""

TESTS = """
from conftest import lost, ERROR

@pytest.mark.gpumem(max_reserved="3GiB")
def test_breaks(cuda):
    lost.append(1)
    raise RuntimeError(ERROR)

@pytest.mark.gpumem(max_reserved="3GiB")
@pytest.mark.parametrize("number", range(6))
def test_works(cuda, number):
    pass
"""


@pytest.mark.parametrize("more", [(), ("--gpumem-share",), ("--dist=worksteal",)])
def test_a_worker_that_lost_its_context_is_replaced(
    project: Project, more: tuple[str, ...]
) -> None:
    project.write(conftest=CONFTEST, test_it=TESTS)
    result = project.run_apart("-n2", *more)
    result.stdout.fnmatch_lines(
        [
            "the CUDA context of the process is lost (CUDA error: device-side assert triggered): "
            "its worker is replaced",
            "*1 failed, 6 passed*",
        ]
    )


def test_without_workers_no_further_test_is_run(project: Project) -> None:
    project.write(conftest=CONFTEST, test_it=TESTS)
    result = project.run_apart()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["!*test_it.py::test_breaks: the CUDA context of the process is lost (*): no further *"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_worker_that_really_crashes_is_reported_as_crashed(project: Project) -> None:
    project.write(
        test_it="""
        import os

        @pytest.mark.gpumem
        def test_it():
            os._exit(1)
        """
    )
    project.run_apart("-n1").assert_outcomes(failed=1)


MPS = """
# Under MPS a fault of one client is one of all that run meanwhile.
import pathlib
import time
from pytest_gpumem.device.simulated import SimulatedDevice

ERROR = "CUDA error: an illegal memory access was encountered"
broken, others = pathlib.Path("broken"), pathlib.Path("others")
SimulatedDevice.shares_faults = True
lost = []
SimulatedDevice.fault = lambda device: ERROR if lost else None

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)
"""

SUSPECTS = """
from conftest import *

@pytest.mark.gpumem(max_reserved="3GiB")
def test_breaks():
    torch.ones(3, device="cuda")
    if not broken.exists():
        wait_for(others)
        broken.touch()
    lost.append(1)
    raise RuntimeError(ERROR)

@pytest.mark.gpumem(max_reserved="3GiB")
def test_beside_it():
    torch.ones(3, device="cuda")
    if not broken.exists():
        others.touch()
        wait_for(broken)
        lost.append(1)
        raise RuntimeError(ERROR)
"""


def test_under_mps_tests_beside_a_fault_run_again_alone(
    project: Project,
) -> None:
    project.write(conftest=MPS, test_it=SUSPECTS)
    result = project.run_apart("-n2", "--gpumem-share", "-v")
    result.stdout.fnmatch_lines(["*RESCHEDULED*test_it.py::*"])
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_breaks*", "*1 failed, 1 passed*"])
