"""Problems around a measurement are reported in one sentence, however quiet pytest is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_project import Project

ONE_TEST = """
    @pytest.mark.gpumem
    def test_one():
        torch.empty(512, dtype=torch.uint8, device="cuda")
"""


def test_a_damaged_baseline_fails_the_test_with_its_sentence_alone(project: Project) -> None:
    project.write(test_it=ONE_TEST)
    project.run("--gpumem-update-baselines")
    (path,) = (project.path / "baselines").rglob("*.json")
    path.write_text("{")

    result = project.run("-q")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random([f"baseline {path.relative_to(project.path)} is *"])
    result.stdout.no_fnmatch_line("*BaselineError*")
    assert path.read_text() == "{"


def test_a_quiet_run_reports_a_report_that_cannot_be_written(project: Project) -> None:
    project.write(test_it=ONE_TEST)
    (project.path / "folder").mkdir()

    result = project.run("-q", "--gpumem-report=json:folder")

    assert result.ret == 1
    result.stdout.fnmatch_lines_random(
        ["note: the exit status is not 0, because report folder cannot be written: *"]
    )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no others")
def test_only_a_folder_that_was_made_for_a_report_is_said_to_be_new(project: Project) -> None:
    project.write(test_it=ONE_TEST)

    result = project.run(
        "-q", "--gpumem-report=json:/proc/nowhere/it", "--gpumem-report=json:new/it"
    )

    assert result.ret == 1
    result.stdout.fnmatch_lines_random(["*report /proc/nowhere/it cannot be written: *"])
    result.stdout.fnmatch_lines_random(["note: *new did not exist and was made for the report in*"])
    result.stdout.no_fnmatch_line("*/proc/nowhere did not exist*")


def test_a_skip_condition_at_import_on_marked_tests_is_reported(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        def test_skipped():
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    result = project.run()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines_random(
        ["note: 1 test that would be measured was skipped by a condition that was evaluated at im*"]
    )

    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=1)


def test_a_module_that_skips_itself_at_import_is_reported(project: Project) -> None:
    tests = """
        pytestmark = pytest.mark.gpumem

        def test_it():
            torch.empty(512, dtype=torch.uint8, device="cuda")
    """
    project.write(
        test_gpu="""
        if not torch.cuda.is_available():
            pytest.skip("not here", allow_module_level=True)
    """
        + tests,
        test_other="""
        pytest.importorskip("no_such_library")
    """
        + tests,
    )

    result = project.run()
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(
        ["note: 1 module was skipped by pytest.skip() as it was imported: *=session"]
    )
    spread = project.run("-n2", "-pxdist")
    spread.stdout.fnmatch_lines_random(["note: 1 module was skipped by pytest.skip() *"])

    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=1, skipped=1)


def test_a_unittest_decorator_that_skips_at_import_is_reported(project: Project) -> None:
    project.write(
        test_it="""
        import unittest

        @pytest.mark.gpumem
        class TestIt(unittest.TestCase):
            @unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
            def test_skipped(self):
                torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    result = project.run()

    result.stdout.fnmatch_lines_random(["note: 1 test that would be measured was skipped by *"])
    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=1)


@pytest.mark.parametrize("name", ["gpumen", "gpu_mem", "GPUMem"])
def test_a_misspelt_marker_is_an_error(project: Project, name: str) -> None:
    project.write(test_it=ONE_TEST.replace("gpumem", name))

    result = project.run("-Wignore::pytest.PytestUnknownMarkWarning")

    result.assert_outcomes(errors=1)
    said = f"test_it.py::test_one: @pytest.mark.{name}: did you mean @pytest.mark.gpumem?"
    result.stdout.fnmatch_lines([said])


def test_a_marker_that_the_project_has_registered_is_its_own(project: Project) -> None:
    project.write(test_it=ONE_TEST.replace("gpumem", "gpu_mem").replace("cuda", "cpu"))
    project.write_ini("markers =\n    gpu_mem(size): of the project")

    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize("args", [(), ("-n2", "-pxdist")])
def test_unmarked_tests_that_need_a_gpu_are_reported(project: Project, args: list[str]) -> None:
    project.write(
        test_it="""
        @pytest.fixture
        def model():
            return torch.nn.Linear(10, 10).cuda()

        def test_body():
            torch.ones(1, device="cuda")

        def test_set_up(model):
            pass

        def test_of_another_reason():
            raise AssertionError
        """,
        test_module="""
        ONES = torch.ones(1, device="cuda")

        @pytest.mark.gpumem
        def test_marked():
            ONES + 1
        """,
    )

    result = project.run("--continue-on-collection-errors", *args)

    text = " ".join(" ".join(result.outlines).split())
    assert (
        "note: 2 tests failed because there is no GPU, and have no gpumem marker, which would "
        "simulate one: mark them with @pytest.mark.gpumem, or run with --gpumem-all or "
        "--gpumem-sim-scope=session note: 1 module failed because there is no GPU as it was "
        "imported: there a GPU that is simulated exists only with --gpumem-sim-scope=session"
    ) in text
    assert "note:" not in project.run("--gpumem-device=off").stdout.str()
    project.run("--gpumem-sim-scope=session").assert_outcomes(passed=3, failed=1)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NV..."),
        RuntimeError("No CUDA GPUs are available"),
    ],
)
def test_each_text_of_torch_without_a_gpu_is_known(project: Project, error: Exception) -> None:
    project.write(test_it=f"def test_one():\n    raise {error!r}\n")

    project.run().stdout.fnmatch_lines(["note: 1 test failed because there is no GPU, and has *"])


def test_a_failure_after_an_assumed_value_is_noted(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem
        def test_reads():
            print(torch.rand(3, device="cuda").mean().item())
            pytest.fail("for a reason of its own")
        """
    )

    result = project.run("--gpumem-sim-values=never")

    result.stdout.fnmatch_lines(["*- gpumem -*", "item() at test_it.py:* it got 0.0"])


def test_the_snapshot_of_a_failure_is_named(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(max="1KiB")
        def test_large():
            torch.empty(4096, dtype=torch.uint8, device="cuda")
        """
    )

    result = project.run("--gpumem-artifacts=artifacts")

    result.stdout.fnmatch_lines_random(["note: test_it.py::test_large: its snapshot is *"])


def test_a_failed_warm_up_is_in_the_report(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(warmup=1)
        def test_fails():
            torch.empty(512, dtype=torch.uint8, device="cuda")
            assert False
        """
    )

    assert project.report()["test_it.py::test_fails"]["outcome"] == "failed"


def test_a_teardown_that_fails_is_an_error_in_the_report(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.fixture
        def model():
            yield torch.empty(512, dtype=torch.uint8, device="cuda")
            raise OSError

        @pytest.mark.gpumem
        def test_one(model):
            pass
        """
    )

    assert project.report()["test_it.py::test_one"]["outcome"] == "error"


def test_a_fixture_that_failed_without_a_gpu_is_set_up_again_with_one(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.fixture(scope="module")
        def model():
            return torch.nn.Linear(10, 10).cuda()

        def test_unmarked(model):
            pass

        @pytest.mark.gpumem
        def test_marked(model):
            model(torch.ones(1, 10, device="cuda"))
        """
    )

    project.run().assert_outcomes(passed=1, errors=1)


@pytest.mark.parametrize(
    ("conftest", "problem"),
    [
        ("import sys; sys.modules['torch'] = None", "torch is not installed: install torch"),
        (
            "import importlib.metadata as m; m.version = lambda name: '2.5.1+cu124'",
            "torch 2.5.1+cu124 is installed: install 2.6 or later",
        ),
    ],
)
def test_an_unusable_torch_is_reported_in_one_sentence(
    project: Project, conftest: str, problem: str
) -> None:
    (project.path / "conftest.py").write_text(conftest)
    (project.path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpumem\ndef test_one():\n    import torch\n"
    )

    result = project.run_apart()

    result.assert_outcomes(errors=1)
    result.stdout.no_fnmatch_line("*ModuleNotFoundError*")
    said = [line for line in result.outlines if line.startswith("the test's GPU memory cannot be")]
    (sentence,) = said
    assert sentence.endswith(f"because {problem}, or run with --gpumem-device=off")


def test_invalid_allocator_settings_are_reported_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "foo:bar," + "x" * 10_000)
    project.write(test_it=ONE_TEST + ONE_TEST.replace("test_one", "test_two"))

    result = project.run()

    result.assert_outcomes(errors=2)
    said = [line for line in result.outlines if line.startswith("PYTORCH_CUDA_ALLOC_CONF=")]
    assert len(said) == 1
    assert "'foo:bar,xxx" in said[0]
    assert "cannot be used: Unrecognized " in said[0]
    assert len(said[0]) < 700
    result.stdout.no_fnmatch_line("*All traceback entries are hidden*")
    result.stdout.no_fnmatch_line("*SettingsError*")


def test_invalid_allocator_settings_end_a_simulated_session(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    project.write(test_it=ONE_TEST)

    result = project.run("--gpumem-sim-scope=session")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: PYTORCH_CUDA_ALLOC_CONF='backend:cudaMallocAsync' cannot be used: backend:*"]
    )
