"""Runs on machines whose GPUs are divided, exclusive, limited or in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from tests.fake_machine_name import PLUGIN, VARIABLE
from tests.fake_nvml import MACHINES, uuids
from tests.pytest_project import Project

AUTO = "--gpumem-device=auto"

MARKED = """
    @pytest.mark.gpumem
    def test_marked():
        raise AssertionError("it must not run")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own; the variable of a worker's device is unset."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "shared"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Make runs find the machine that the parameter names."""
    name: str = request.param
    monkeypatch.setenv(VARIABLE, name)
    for variable, value in MACHINES[name].environ.items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.mark.parametrize("machine", ["exclusive"], indirect=True)
@pytest.mark.usefixtures("machine")
def test_two_workers_on_a_gpu_in_exclusive_mode_are_refused(project: Project) -> None:
    project.write(test_it=MARKED, test_other=MARKED)
    result = project.run_apart("-n2", *PLUGIN, device=AUTO)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: -n 2: NVIDIA A100-SXM4-40GB is in exclusive-process mode, in which one process "
            "at a time can use it, and MPS does not run; write -n 1, *"
        ]
    )
    result.stdout.no_fnmatch_line("*it must not run*")


@pytest.mark.parametrize("machine", ["exclusive"], indirect=True)
@pytest.mark.usefixtures("machine")
def test_tests_that_do_not_use_the_gpu_are_not_refused(project: Project) -> None:
    project.write(test_it="def test_it(): pass")
    project.run_apart("-n2", *PLUGIN, device=AUTO).assert_outcomes(passed=1)
    project.write(test_it='@pytest.mark.gpumem\ndef test_it(): torch.ones(1, device="cuda")')
    project.run_apart("-n2", *PLUGIN).assert_outcomes(passed=1)


@pytest.mark.parametrize("machine", ["prohibited"], indirect=True)
@pytest.mark.parametrize("workers", [(), ("-n1",)])
@pytest.mark.usefixtures("machine")
def test_a_gpu_in_prohibited_mode_is_refused_for_any_workers(
    project: Project, workers: tuple[str, ...]
) -> None:
    project.write(test_it=MARKED)
    result = project.run_apart(*workers, *PLUGIN, device=AUTO)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: NVIDIA A100-SXM4-40GB is in compute mode prohibited, *"])


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("mps", "NVIDIA H100 80GB HBM3 (MPS, exclusive-process mode); "),
        ("hami", "NVIDIA A100-SXM4-40GB (HAMi leaves 2.93 GiB); "),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_the_header_describes_the_device(project: Project, said: str) -> None:
    project.write(test_it="def test_it(): pass")
    result = project.run_apart(*PLUGIN, device=AUTO)
    result.stdout.fnmatch_lines(
        [f"gpumem: a CUDA device if torch sees one, else simulated A100-40GB*; {said}*torch *"]
    )


SHOWS = """
    import os

    def test_shows():
        print("VISIBLE", os.environ.get("CUDA_VISIBLE_DEVICES"))
        print("THREADS", os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
        print("MEMORY", os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"))
"""
EACH = """
    import os, pytest, time

    @pytest.mark.parametrize("number", range(3))
    def test_shows(number, tmp_path_factory):
        folder = tmp_path_factory.getbasetemp().parent
        (folder / os.environ["PYTEST_XDIST_WORKER"]).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        while len(list(folder.glob("gw?"))) < 3:  # no worker takes another's test
            time.sleep(0.01)
"""


@pytest.mark.parametrize("machine", ["mig"], indirect=True)
@pytest.mark.usefixtures("machine")
def test_each_worker_gets_an_instance_of_mig(project: Project) -> None:
    project.write(test_it=EACH)
    result = project.run_apart("--gpumem-share", "-n3", "--dist=each", *PLUGIN, device=AUTO)
    result.assert_outcomes(passed=9)
    written = [path.read_text() for path in project.path.rglob("gw?")]
    assert sorted(written) == sorted(uuids("mig"))


@pytest.mark.parametrize(
    ("machine", "given", "shown"),
    [
        # The first is busy with 30 of its 40 GiB.
        ("two", None, [1, 0]),
        ("two", "0", [0]),
    ],
    indirect=["machine"],
)
def test_one_process_gets_the_least_loaded_visible_gpu(
    project: Project,
    machine: str,
    given: str | None,
    shown: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project.write(
        test_it="def test_it(): pass", conftest=SHOWS.replace("def test_shows()", "if True")
    )
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    result = project.run_apart("--gpumem-share", "-s", *PLUGIN, device=AUTO)
    visible = given or ",".join(uuids(machine)[index] for index in shown)
    result.stdout.fnmatch_lines([f"*VISIBLE {visible}"])  # by the first conftest


@pytest.mark.parametrize("machine", ["mps"], indirect=True)
@pytest.mark.usefixtures("machine")
def test_a_quota_limits_a_client_of_mps(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "70")
    project.write(test_it=SHOWS)
    result = project.run_apart("--gpumem-quota=8GiB", "-s", *PLUGIN, device=AUTO)
    # 8 GiB and 600 MiB for the context; a limit that the user has set is kept.
    result.stdout.fnmatch_lines(["*VISIBLE None", "THREADS 70", "MEMORY 0=8792M"])
