"""Workers on several hosts, each with a ledger of its own: folders stand for hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from pytest_gpumem.sharing.ledger import Ledger
from tests.forked import quick
from tests.pytest_project import Project

pytestmark = pytest.mark.filterwarnings("ignore")

GIB = 2**30


def host(folder: Path, number: int, *more: str) -> str:
    """Return the ``--tx`` specification of a worker on the host ``number``."""
    here = folder / f"host{number}"
    here.mkdir(exist_ok=True)
    share = f"env:{FOLDER_VARIABLE}={folder / f'shared{number}'}"
    return "//".join(["popen", f"python={quick()}", f"chdir={here}", share, *more])


def granted(folder: Path) -> set[str]:
    ledger = Ledger(folder)
    found = {stay.nodeid for stay in ledger.stays()}
    ledger.close()
    return found


SUITE = """
    import os
    import time

    @pytest.mark.parametrize("number", range(5))
    @pytest.mark.gpumem(max_reserved="9GiB")
    def test_takes(number):
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        time.sleep(0.1)

    @pytest.mark.parametrize("number", range(3))
    def test_plain(number):
        pass
"""


@pytest.fixture
def hosts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the hosts' ledgers, apart from the controller's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "controller"))
    return tmp_path


def test_each_host_has_its_ledger_and_the_controller_sees_all(
    project: Project, hosts_folder: Path
) -> None:
    project.write_ini("")
    project.write(test_it=SUITE)
    result = project.run_apart(
        "--gpumem-share",
        "--gpumem-update-baselines",
        "--dist=load",
        f"--tx=2*{host(hosts_folder, 1)}",
        f"--tx={host(hosts_folder, 2)}",
        f"--rsyncdir={project.path}",
        str(project.path),
    )
    assert result.parseoutcomes()["passed"] == 8
    ones, others = granted(hosts_folder / "shared1"), granted(hosts_folder / "shared2")
    assert ones | others == {f"test_it.py::test_takes[{number}]" for number in range(5)}
    assert ones
    assert others
    assert not ones & others
    # No test ran on the controller's host.
    assert not (hosts_folder / "controller").exists()
    for number, share in ((1, ones), (2, others)):
        workers = 2 if number == 1 and len(ones) > 1 else 1
        result.stdout.fnmatch_lines_random(
            [
                f"note: * (*shared{number}) simulated T4 cuda:0: {len(share)} test* on {workers} "
                "worker* in * s, *"
            ]
        )
    (baselines,) = project.baselines().values()
    assert len(baselines) == 5


REAL_ON_ONE = """
    import os

    from pytest_gpumem import simulate

    machine = None

    def pytest_configure(config):
        # A simulated GPU takes the place of a real one.
        global machine
        if os.environ.get("HAS_GPU"):
            machine = simulate("H100")
            machine.__enter__()

    def pytest_unconfigure(config):
        if machine is not None:
            machine.__exit__(None, None, None)

    from pytest_gpumem.device.cuda import CudaDevice
    from pytest_gpumem.sharing.devices import SharedSimulatedDevice

    CudaDevice.share = lambda device, folder: [SharedSimulatedDevice(folder, "GPU-0", 80 << 30)]
    CudaDevice.held = lambda device, name: (0, 0)
"""


def test_a_host_without_a_gpu_leaves_its_marked_tests_to_one_that_has(
    project: Project, hosts_folder: Path
) -> None:
    project.write_ini("")
    project.write(conftest=REAL_ON_ONE, test_it=SUITE)
    result = project.run_apart(
        "--gpumem-share",
        "--dist=load",
        f"--tx={host(hosts_folder, 1)}",
        f"--tx={host(hosts_folder, 2, 'env:HAS_GPU=1')}",
        f"--rsyncdir={project.path}",
        f"--gpumem-report=json:{project.path / 'report.json'}",
        str(project.path),
        device="--gpumem-device=auto",
    )
    assert result.parseoutcomes()["passed"] == 8
    report = json.loads((project.path / "report.json").read_text())
    assert not report["environment"]["simulated"]
    assert len(report["tests"]) == 5
    # A test that was measured on another device would name it.
    assert not any("environment" in test for test in report["tests"])


def test_differing_hosts_are_listed(project: Project, hosts_folder: Path) -> None:
    project.write_ini("")
    project.write(conftest=REAL_ON_ONE, test_it=SUITE)
    result = project.run_apart(
        "--dist=each",
        "--gpumem-update-baselines",
        f"--tx={host(hosts_folder, 1)}",
        f"--tx={host(hosts_folder, 2, 'env:HAS_GPU=1')}",
        f"--rsyncdir={project.path}",
        f"--gpumem-report=json:{project.path / 'report.json'}",
        "-ktest_takes",
        str(project.path),
        device="--gpumem-device=auto",
    )
    result.stdout.fnmatch_lines(["note: gw0: simulated GPU (torch *)", "note: gw1: * H100 *"])
    report = json.loads((project.path / "report.json").read_text())
    assert len(report["tests"]) == 10
    assert sum("environment" in test for test in report["tests"]) == 5
    environments = {name.partition("/")[0].partition("-torch")[0] for name in project.baselines()}
    assert environments == {"sim-A100-40GB", "cuda-NVIDIA-H100-80GB-HBM3"}
