"""Tests of unknown need are simulated before they share a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from pytest_gpumem.sharing.ledger import Ledger
from tests.integration.test_prediction import REAL, STAND_IN
from tests.pytest_project import Project

MIB, GIB = 2**20, 2**30

SHARED = """
    from pathlib import Path

    from pytest_gpumem.device.cuda import CudaDevice
    from pytest_gpumem.sharing.devices import SharedSimulatedDevice

    # NVML, which is not there, would say how much there is.
    CudaDevice.share = lambda device, folder: [SharedSimulatedDevice(folder, "GPU-0", 80 << 30)]
    CudaDevice.held = lambda device, name: (0, 0)
"""

SUITE = """
    @pytest.mark.gpumem
    @pytest.mark.parametrize("gib", [1, 2, 3])
    def test_it(gib):
        torch.empty(gib << 30, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_of_the_gpu_alone():
        import os
        assert "PYTEST_GPUMEM_REQUEST" not in os.environ
        torch.ones(1, device="cuda")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


def granted(folder: Path) -> dict[str, int]:
    ledger = Ledger(folder)
    stays = ledger.stays()
    ledger.close()
    return {stay.nodeid.partition("::")[2]: stay.bytes for stay in stays}


def test_tests_of_unknown_need_are_simulated_once(project: Project, folder: Path) -> None:
    project.write(conftest=STAND_IN + SHARED, test_it=SUITE)
    use = ("cacheprovider",)
    project.run_apart("-n2", "--gpumem-share", device=REAL, use=use).assert_outcomes(passed=4)
    assert granted(folder) == {
        "test_it[1]": round(1.1 * GIB),
        "test_it[2]": round(2.2 * GIB),
        "test_it[3]": round(3.3 * GIB),
        "test_of_the_gpu_alone": 0,  # and nothing beside it
    }
    # One process for the simulation, two workers.
    ran = (project.path / "processes.txt").read_text().split()
    assert sorted(ran) == ["real", "real", "simulated"]
    path = project.path / ".pytest_cache" / "d" / "gpumem" / "learned.json"
    (tests,) = json.loads(path.read_text())["environments"].values()
    known = {nodeid.partition("::")[2]: lesson for nodeid, lesson in tests.items()}
    assert known["test_it[3]"]["predicted"] == round(3.3 * GIB)
    assert known["test_it[3]"]["reserved"] == 3 * GIB
    assert known["test_of_the_gpu_alone"] == {
        **known["test_of_the_gpu_alone"],
        "predicted": 0,
        "reserved": 2 * MIB,
    }

    # The next run knows the tests' needs, and simulates nothing.
    project.run_apart("-n2", "--gpumem-share", device=REAL, use=use).assert_outcomes(passed=4)
    assert granted(folder)["test_it[3]"] == 3 * GIB
    assert (project.path / "processes.txt").read_text().split().count("simulated") == 1


def test_a_single_worker_simulates_nothing(project: Project, folder: Path) -> None:
    project.write(conftest=STAND_IN + SHARED, test_it=SUITE)
    project.run_apart("-n1", "--gpumem-share", device=REAL).assert_outcomes(passed=4)
    assert set(granted(folder).values()) == {0}
    assert "simulated" not in (project.path / "processes.txt").read_text()
