"""``predict=``: a measurement has to agree with the simulation."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest

from pytest_gpumem.baseline.verdict import Verdict
from tests.pytest_project import Project

pytestmark = pytest.mark.usefixtures("plain_workspaces")

REAL = "--gpumem-device=cuda"

STAND_IN = """
    import os

    from pytest_gpumem import simulate

    PREDICTS = "PYTEST_GPUMEM_REQUEST" in os.environ
    machine = None

    def pytest_addoption(parser):
        parser.addoption("--rows", type=int, default=256)

    def pytest_configure(config):
        # A simulated GPU takes the place of a real one: torch alone is asked for it.
        global machine
        if not PREDICTS and (hasattr(config, "workerinput") or config.option.numprocesses is None):
            machine = simulate("H100")
            machine.__enter__()

    def pytest_unconfigure(config):
        if machine is not None:
            machine.__exit__(None, None, None)

    @pytest.fixture(scope="session", autouse=True)
    def once(request):
        with (request.config.rootpath / "processes.txt").open("a") as file:
            file.write("simulated\\n" if PREDICTS else "real\\n")

    @pytest.fixture
    def rows(request):
        given = os.environ.get("PREDICTED_ROWS") if PREDICTS else None
        return int(given or request.config.getoption("rows"))
"""

TESTS = """
    import unittest

    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x):
            return self.layer(x)

    @pytest.mark.gpumem(predict="1%")
    def test_forward(rows):
        Model().cuda()(torch.ones(rows, 256, device="cuda"))

    @pytest.mark.gpumem(predict="1%", max=1, gpu="T4")
    class TestUnit(unittest.TestCase):
        def test_limit(self):
            self.x = torch.ones(256, device="cuda")

    @pytest.mark.gpumem(predict="1%", gpu=["T4", "L4"])
    def test_several():
        torch.ones(256, device="cuda")

    @pytest.mark.gpumem
    def test_without():
        torch.ones(256, device="cuda")
"""

KIB, MIB = 1 << 10, 1 << 20
WORKSPACE = 32 * MIB
"""The workspace of cuBLAS on Hopper."""


@pytest.fixture
def real(project: Project) -> Project:
    """Return a project whose torch takes a stand-in for a real H100."""
    project.write(conftest=STAND_IN, test_model=TESTS)
    return project


def report(project: Project, *args: str) -> dict[str, Any]:
    """Run pytest on the stand-in and return the report's tests by name."""
    path = project.path / "report.json"
    project.run_apart(f"--gpumem-report=json:{path}", *args, device=REAL)
    tests = json.loads(path.read_text())["tests"]
    return {test["nodeid"].rpartition("::")[2]: test for test in tests}


def verdicts(test: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    return {v["phase"]: v for v in test["verdicts"] if v["kind"] == "prediction"}


def test_a_measurement_that_agrees_passes(real: Project) -> None:
    tests = report(real)

    test = tests["test_forward"]
    assert not test["measurement"]["simulated"]
    found = verdicts(test)
    assert set(found) == {None, "setup", "call", "forward"}
    for verdict in found.values():
        assert verdict["passed"]
        assert verdict["actual"] == verdict["reference"]
    # Weight and bias, input and output.
    peak = 256 * KIB + 1 * KIB + 2 * 256 * KIB + WORKSPACE
    assert test["measurement"]["peak_allocated"] == peak
    prediction = test["prediction"]
    assert (prediction["gpu"], prediction["peak_allocated"]) == ("H100", peak)
    assert prediction["phases"]["forward"]["peak_allocated"] == peak
    assert prediction["composition"] == {
        "parameters": 257 * KIB,
        "inputs": 256 * KIB,
        "activations": 256 * KIB,
        "workspace": WORKSPACE,
    }
    # Neither its limit nor the GPU model of its marker changes a test's need.
    assert verdicts(tests["test_limit"])[None]["passed"]
    assert verdicts(tests["test_several[T4]"])[None]["passed"]
    assert verdicts(tests["test_without"]) == {}
    assert tests["test_without"]["prediction"] is None
    # One process for the module; the prediction set up no fixture in the measured process.
    assert (real.path / "processes.txt").read_text().split() == ["simulated", "real"]


@pytest.mark.parametrize(
    ("rows", "difference", "words", "change"),
    [
        (
            32,
            448 * KIB,
            "448.0 KiB over its prediction of 32.3 MiB (+1.4 %, tolerance 1%)",
            "grown",
        ),
        (
            1024,
            -1536 * KIB,
            "1.5 MiB under its prediction of 34.3 MiB (-4.4 %, tolerance 1%); the prediction is "
            "too high, which is as wrong as one that is too low",
            "shrunk",
        ),
    ],
)
def test_a_difference_in_either_direction_fails_and_is_explained(
    real: Project,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    difference: int,
    words: str,
    change: str,
) -> None:
    # Input and output have 1 KiB each for each row, and there are 256 in reality.
    monkeypatch.setenv("PREDICTED_ROWS", str(rows))

    test = report(real, "-k", "test_forward")["test_forward"]

    assert test["outcome"] == "failed"
    for phase, verdict in verdicts(test).items():
        assert verdict["passed"] == (phase == "setup")
    forward = Verdict.from_dict(verdicts(test)["forward"])
    assert forward.actual - (forward.reference or 0) == difference
    assert words in forward.short
    assert [(line["bytes"], line["category"]) for line in forward.explanation] == [
        (difference // 2, "activations"),
        (difference // 2, "inputs"),
    ]
    assert {line["change"] for line in forward.explanation} == {change}


def test_options_of_the_run_apply_to_the_prediction(real: Project) -> None:
    real.write_ini("addopts = --rows=512 --basetemp=temporary")
    real.path.joinpath("temporary").mkdir()

    tests = report(real, "-k", "test_forward", "-o", "console_output_style=classic", "-x")

    assert tests["test_forward"]["outcome"] == "passed"
    assert tests["test_forward"]["prediction"]["composition"]["inputs"] == 512 * KIB


def test_a_prediction_runs_only_its_tests_and_writes_no_files(real: Project) -> None:
    body = """
        from pathlib import Path

        PREDICTS = "PYTEST_GPUMEM_REQUEST" in os.environ

        @pytest.mark.gpumem(predict="1%")
        def test_it(tmp_path_factory):
            torch.ones(256, device="cuda")
            kept = tmp_path_factory.getbasetemp() / "kept"
            if not PREDICTS:
                assert kept.exists() == EXPECTED
                kept.touch()

        def test_unmarked(request):
            if PREDICTS:
                (request.config.rootpath / "ran").touch()
    """
    body = "import os\n" + dedent(body)
    real.write(test_a=body.replace("EXPECTED", "False"), test_b=body.replace("EXPECTED", "True"))
    (real.path / "test_model.py").unlink()

    result = real.run_apart("--basetemp=temporary", device=REAL)

    result.assert_outcomes(passed=4)
    assert not (real.path / "ran").exists()


def test_workers_predict_the_tests_that_they_run(real: Project) -> None:
    tests = report(real, "-n1", "--rows=512", "-k", "test_forward")

    assert tests["test_forward"]["outcome"] == "passed"
    assert tests["test_forward"]["prediction"]["composition"]["inputs"] == 512 * KIB
    assert verdicts(tests["test_forward"])[None]["passed"]


def test_a_test_that_cannot_be_predicted_fails(real: Project) -> None:
    real.write(
        test_odd="""
            import os

            PREDICTS = "PYTEST_GPUMEM_REQUEST" in os.environ
            pytestmark = pytest.mark.gpumem(predict="1%")

            def test_fails_there():
                x = torch.ones(256, device="cuda")
                assert not PREDICTS

            def test_skipped_there():
                x = torch.ones(256, device="cuda")
                if PREDICTS:
                    pytest.skip("not today")

            def test_out_of_memory_there():
                x = torch.ones((1 << 40) if PREDICTS else 256, device="cuda")

            def test_phase_here(gpumem):
                with gpumem.phase("here"):
                    x = torch.ones(256, device="cuda")
                if PREDICTS:
                    with gpumem.phase("there"):
                        y = torch.ones(256, device="cuda")
                else:
                    y = torch.ones(256, device="cuda")
                    with gpumem.phase("too"):
                        x + y

            @pytest.mark.skipif(True, reason="never")
            def test_skipped():
                pass
        """
    )
    path = real.path / "report.json"

    result = real.run_apart(
        f"--gpumem-report=json:{path}", "test_odd.py", "-rA", "-vv", device=REAL
    )

    result.assert_outcomes(failed=4, skipped=1)
    peaked = "the test peaked at 1.0 KiB (1,024 B) and could not be predicted; on a simulated H100"
    result.stdout.fnmatch_lines_random(
        [
            f"{peaked}: assert not True",
            f"{peaked}: not today",
            f"{peaked}: it runs out of memory",
            "phase there did not run, so its prediction of 2.0 KiB was not checked; "
            "phases that ran: setup, call, here, too",
            "too peaked at * and could not be predicted; simulated phases: setup, call, *, there",
        ]
    )


def test_a_gpu_outside_the_catalogue_is_simulated_from_its_properties(real: Project) -> None:
    source = (real.path / "conftest.py").read_text()
    model = 'GpuModel("mine", "Custom GPU", 5 << 30, (9, 0), 20, 2048, 1 << 20)'
    source = source.replace('simulate("H100")', f"simulate({model})")
    source = "from pytest_gpumem.simulated.gpu.catalogue import GpuModel\n" + source
    (real.path / "conftest.py").write_text(source)

    test = report(real, "-k", "test_forward")["test_forward"]

    assert test["environment"]["gpu"] if "environment" in test else True
    assert test["prediction"]["gpu"] == "Custom GPU"
    assert test["outcome"] == "passed"


def test_a_simulated_run_notes_that_no_prediction_was_checked(project: Project) -> None:
    project.write(
        test_model="""
            pytestmark = pytest.mark.gpumem(predict="1%")

            def test_one():
                torch.ones(256, device="cuda")

            def test_two():
                torch.ones(256, device="cuda")
        """
    )
    path = project.path / "report.json"

    result = project.run(f"--gpumem-report=json:{path}")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["note: predict= is checked on a GPU; simulated, a prediction is the measurement itself*"]
    )
    for test in project.written_report().values():
        assert test["prediction"] is None
        assert verdicts(test) == {}
