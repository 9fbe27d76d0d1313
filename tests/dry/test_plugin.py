"""Tests of a user's project on the dry device: what they see, and what is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cached_answers import CACHED
from tests.dry.conftest import REPOSITORY, Run, bare_environment

TESTS = """
import pytest, pytest_gpumem, torch

AT_IMPORT = torch.cuda.is_available(), torch.cuda.device_count()

def test_unmarked():
    assert AT_IMPORT == (False, 0)
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() is None

def test_simulated():
    with pytest_gpumem.simulate("T4"):
        torch.cuda.synchronize()
        assert torch.cuda.get_device_name() == "Tesla T4"

@pytest.fixture
def model():
    return torch.nn.Linear(1000, 1000, bias=False, device="cuda")

@pytest.mark.gpumem(max="9MB")
def test_within(model):
    assert torch.cuda.device_count() == 1
    model.weight + 1

@pytest.mark.gpumem(max="1MB")
def test_over():
    torch.empty(1024, 1024, device="cuda")

@pytest.mark.gpumem(gpu="T4")
def test_another_model():
    torch.empty(1, device="cuda")

@pytest.mark.gpumem(baseline=True)
def test_baseline():
    torch.empty(1000, device="cuda")
"""

needs_libraries = pytest.mark.skipif(
    find_spec("nvidia") is None,
    reason="without NVIDIA's packages torch is imported only where the runtime is there before",
)

UNDER_TEST = "-p no:cacheprovider -p no:randomly".split()


def pytest_in(
    folder: Path, *arguments: str, device: str = "dry", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a new process, in ``folder``."""
    chosen = f"--gpumem-device={device}"
    return run_in(folder, "pytest", *UNDER_TEST, chosen, *arguments, **variables)


def run_in(folder: Path, *module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments in a new process, in ``folder``."""
    command, env = [sys.executable, "-m", *module], bare_environment() | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def reported(folder: Path, *arguments: str) -> Any:
    """Run pytest in ``folder`` and return its output and the tests of its report, by name."""
    done = pytest_in(folder, "--gpumem-report=json:report.json", *arguments)
    report = json.loads((folder / "report.json").read_text())
    tests = {test["nodeid"].partition("::")[2]: test for test in report["tests"]}
    return done.stdout, report["environment"], tests


@pytest.fixture(scope="module")
def project(dry_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests above."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_dry.py").write_text(TESTS)
    return folder


@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="in this process"),
        pytest.param(("-n", "2"), id="workers"),
        pytest.param(("-n", "2", "--gpumem-share"), id="workers that share a GPU"),
        pytest.param(("-p", "torch"), id="torch is imported first", marks=needs_libraries),
    ],
)
def test_marked_tests_are_measured_and_others_see_no_device(
    project: Path, how: tuple[str, ...]
) -> None:
    output, environment, tests = reported(project, "--gpumem-update-baselines=new", *how)

    assert "1 failed, 4 passed, 1 skipped" in output
    assert environment["dry"] is True
    assert environment["simulated"] is False
    assert environment["gpu"] == "A100-40GB"
    within, over = tests["test_within"], tests["test_over"]
    # 1000 x 1000 numbers of 4 bytes are 4,000,256 in blocks of 512; a weight, and what is added.
    assert within["measurement"]["peak_allocated"] == 2 * 4_000_256
    assert over["measurement"]["peak_allocated"] == 4 * 1024 * 1024
    assert "3.0 MiB over its limit of 976.6 KiB" in " ".join(output.split())
    assert [path.name for path in (project / "baselines").glob("[!.]*")] == [
        f"dry-A100-40GB-torch{environment['torch']}"
    ]


def test_baselines_are_exact(project: Path) -> None:
    _, environment, _ = reported(project, "--gpumem-update-baselines=new")
    stored = project / f"baselines/dry-A100-40GB-torch{environment['torch']}/test_dry.py.json"
    text = stored.read_text()
    assert text.count("4096") >= 1
    try:
        stored.write_text(text.replace("4096", "3584"))
        done = pytest_in(project, "test_dry.py::test_baseline")
    finally:
        stored.write_text(text)

    assert "512 B" in done.stdout
    assert done.returncode == 1


KEYWORDS = """
import pytest, torch

@pytest.mark.gpumem(min_memory="20GiB")
def test_large_enough():
    torch.empty(1024, device="cuda")

@pytest.mark.gpumem(min_memory="200GiB")
def test_too_small():
    torch.empty(1024, device="cuda")

@pytest.mark.gpumem(predict="1%")
def test_predicted():
    torch.empty(1024, device="cuda")

@pytest.mark.gpumem(isolate=True)
def test_isolated():
    torch.empty(1024, device="cuda")
"""


def test_the_device_says_what_it_has_before_a_test_begins(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_keywords.py").write_text(KEYWORDS)
    done = pytest_in(tmp_path)

    assert "3 passed, 1 skipped" in done.stdout
    assert "3 tests on dry A100-40GB" in done.stdout


SETTINGS = """
import pytest, torch

pytestmark = pytest.mark.gpumem

def test_changes():
    torch.zeros(1, device="cuda")
    torch.cuda.set_device(1)
    torch.cuda.set_per_process_memory_fraction(0.00001, 0)

def test_finds_nothing_changed():
    assert torch.zeros(1, device="cuda").device.index == 0
"""


def test_settings_of_torch_end_with_the_body_that_changed_them(
    dry_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "test_settings.py").write_text(SETTINGS)

    done = pytest_in(tmp_path, device="dry:H100*2")

    assert "2 passed" in done.stdout


BROKEN_FIXTURE = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")
"""


def test_the_plugin_is_in_no_traceback(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BROKEN_FIXTURE)
    (tmp_path / "test_broken.py").write_text(
        """
import pytest, torch

@pytest.mark.gpumem
def test_it(broken):
    torch.zeros(1, device="cuda")
"""
    )

    done = pytest_in(tmp_path)

    assert "1 passed, 1 error" in done.stdout
    assert "pytest_runtest_teardown" not in done.stdout


def test_the_device_may_be_there_for_the_whole_session(project: Path) -> None:
    done = pytest_in(project, "--gpumem-sim-scope=session", "-k", "unmarked")

    assert "assert (True, 1) == (False, 0)" in done.stdout


UNASKED = """
import pytest, torch

def test_before():
    torch.ones(3, device="cuda")

def test_on_the_cpu():
    torch.ones(3)

@pytest.mark.gpumem
def test_marked():
    torch.ones(3, device="cuda")

def test_after():
    torch.ones(3, device="cuda") + 1
"""


def test_an_unmarked_test_that_allocates_fails(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_unasked.py").write_text(UNASKED)
    done = pytest_in(tmp_path)

    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "FAILED test_unasked.py::test_before - Failed: No CUDA GPUs" in done.stdout
    assert "FAILED test_unasked.py::test_after - Failed: No CUDA GPUs" in done.stdout
    assert "note: 2 tests failed because there is no GPU" in done.stdout
    assert "4 passed" in pytest_in(tmp_path, "--gpumem-sim-scope=session").stdout


CHILDREN = """
import subprocess, sys, pytest

SEES = "import torch; print(torch.cuda.device_count())"

def seen():
    command = [sys.executable, "-c", SEES]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

@pytest.mark.gpumem
def test_marked():
    import torch
    torch.empty(1, device="cuda")
    assert seen() == "1"

def test_unmarked():
    assert seen() == "0"
"""


@needs_libraries
@pytest.mark.parametrize("how", [(), ("-n", "2"), ("-p", "torch")])
def test_processes_of_marked_tests_alone_have_the_device(
    dry_run: Run, tmp_path: Path, how: tuple[str, ...]
) -> None:
    (tmp_path / "test_children.py").write_text(CHILDREN)
    done = pytest_in(tmp_path, *how)

    assert "2 passed" in done.stdout, done.stdout


def test_it_is_the_device_of_auto(project: Path) -> None:
    done = pytest_in(project, "-k", "within", device="auto")

    assert "1 test on dry A100-40GB: 1 ok" in done.stdout


def test_a_cached_answer_is_that_of_the_present_device(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_cached.py").write_text(CACHED)
    done = pytest_in(tmp_path, "-p", "no:randomly")

    assert "3 passed" in done.stdout, done.stdout


MODELS = """
import pytest, torch

@pytest.mark.gpumem(gpu=["A100-40GB", "T4"])
def test_models():
    torch.empty(1, device="cuda")
    assert torch.cuda.get_device_name() in ("NVIDIA A100-SXM4-40GB", "Tesla T4")
"""


@needs_libraries
def test_other_models_are_simulated_beside_the_device_of_auto(tmp_path: Path) -> None:
    (tmp_path / "test_models.py").write_text(MODELS)
    done = pytest_in(tmp_path, device="auto")

    assert "2 passed" in done.stdout, done.stdout
    assert "dry A100-40GB, other models simulated" in done.stdout
    assert "2 tests on dry A100-40GB and simulated T4" in " ".join(done.stdout.split())


SECOND_GPU = """
import pytest, torch

@pytest.mark.gpumem(gpu="T4*2")
def test_a_compiled_function_on_the_second_gpu():
    x = torch.ones(1000, device="cuda:1")
    with torch.cuda.device(1):
        torch.compile(lambda x: x.sin() + 1)(x)
    assert torch.cuda.memory_allocated(1) == 4096
"""


@needs_libraries
def test_a_simulated_machine_may_have_more_gpus_than_the_dry_device(tmp_path: Path) -> None:
    (tmp_path / "test_second.py").write_text(SECOND_GPU)
    done = pytest_in(tmp_path, device="auto")

    assert "1 passed" in done.stdout, done.stdout


@needs_libraries
def test_auto_stays_simulated_where_the_baselines_are(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_dry.py").write_text(TESTS)
    (tmp_path / "baselines" / "sim-A100-40GB-torch2.6").mkdir(parents=True)
    done = pytest_in(tmp_path, "-k", "within", device="auto")

    assert "1 test on simulated A100-40GB: 1 ok" in done.stdout, done.stdout


@needs_libraries
def test_auto_is_simulated_where_the_runtime_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "test_dry.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", *UNDER_TEST, "-k", "within"]
    variables = {**bare_environment(), "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )

    assert "1 test on simulated A100-40GB: 1 ok" in done.stdout, done.stdout


@needs_libraries
def test_a_program_that_has_torch_is_told_how_to_start(dry_run: Run, tmp_path: Path) -> None:
    code = "import torch, pytest, sys; sys.exit(pytest.main(['--gpumem-device=dry']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "torch was imported before pytest could load the dry runtime" in done.stderr
    assert "python -m pytest_gpumem.dry" in done.stderr


@needs_libraries
def test_nothing_is_loaded_unless_it_is_asked_for(dry_run: Run) -> None:
    code = "import pytest_gpumem.dry.load as l, torch; print(l.is_loaded())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "False"


def test_a_script_runs_on_it(dry_run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nkept = torch.empty(1024, 1024, device='cuda')\n")
    command = [sys.executable, "-m", "pytest_gpumem.cli", "run", "--device", "dry"]
    done = subprocess.run(
        [*command, "--gpu", "T4", "train.py"],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert "train.py on a dry T4" in done.stdout
    assert "4.0 MiB (4,194,304 B)" in done.stdout


AFTER_DROPOUT = """
import pytest, torch

pytestmark = pytest.mark.gpumem

def test_recurrent():
    torch.nn.LSTM(8, 8, 2, dropout=0.5).cuda()(torch.ones(3, 2, 8, device="cuda"))

@pytest.fixture
def rows():
    return torch.ones(1024, 512, device="cuda")

def test_rows(rows):
    assert rows.is_cuda
"""


def test_a_fixture_reserves_the_same_behind_the_dropout_of_layers(
    dry_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(AFTER_DROPOUT)
    _, _, behind = reported(tmp_path, "-p", "no:randomly")
    _, _, alone = reported(tmp_path, "-k", "rows")

    reserved = [tests["test_rows"]["measurement"]["peak_reserved"] for tests in (behind, alone)]
    assert reserved == [20 << 20, 20 << 20]
