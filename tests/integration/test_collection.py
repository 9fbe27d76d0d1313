"""Markers, GPU models and skips that are decided while tests are collected."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project


def test_a_wrong_marker_is_a_collection_error_in_one_sentence(project: Project) -> None:
    project.write(
        test_wrong="""
        @pytest.mark.gpumem(maximum="1GB")
        def test_keyword():
            pass

        @pytest.mark.gpumem
        def test_fine():
            pass
        """,
        test_class="""
        @pytest.mark.gpumem(max="1 XB")
        class TestClass:
            def test_value(self):
                pass
        """,
        test_right="""
        def test_right():
            pass
        """,
    )

    result = project.run("--continue-on-collection-errors")

    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "test_class.py::TestClass::test_value: gpumem marker: max='1 XB' is not a size*",
            "test_wrong.py::test_keyword: gpumem marker: unknown keyword maximum='1GB'*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    assert project.run().ret == pytest.ExitCode.INTERRUPTED


def test_a_wrong_marker_is_a_collection_error_on_workers_too(project: Project) -> None:
    project.write(
        test_wrong="""
        @pytest.mark.gpumem(warmup=-1)
        def test_wrong():
            pass
        """
    )

    result = project.run_apart("-n2")

    assert result.ret != 0
    result.stdout.fnmatch_lines(["test_wrong.py::test_wrong: gpumem marker: warmup=-1 is not*"])


def test_a_marker_added_after_collection_is_checked_before_the_test(project: Project) -> None:
    project.write(
        conftest="""
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.gpumem(max="none"))
        """,
        test_late="""
        def test_late():
            pass
        """,
    )

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["gpumem marker: max='none' is not a size*"])


def test_a_wrong_option_is_a_usage_error(project: Project) -> None:
    result = project.run(device="--gpumem-device=sim:T5")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --gpumem-device='sim:T5': 'T5' is not a GPU model; known: T4, *"]
    )


def test_markers_merge_by_keyword_and_override_the_ini_file(project: Project) -> None:
    project.write_ini(
        """
        gpumem_max = 1KiB
        gpumem_max_leak = 0
        """
    )
    project.write(
        test_merge="""
        @pytest.mark.gpumem(max="4KiB", max_reserved="2MiB")
        class TestMerged:
            @pytest.mark.gpumem(max="8KiB")
            @pytest.mark.parametrize(
                "size", [8192, pytest.param(16384, marks=pytest.mark.gpumem(max="16KiB"))]
            )
            def test_merged(self, size):
                torch.empty(size, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem
        def test_ini():
            torch.empty(2048, dtype=torch.uint8, device="cuda")
        """
    )

    tests = project.report()

    limits = {
        id_.rpartition("::")[2]: (test["expectation"]["max"], test["outcome"])
        for id_, test in tests.items()
    }
    assert limits == {
        "test_merged[8192]": (8192, "passed"),
        "test_merged[16384]": (16384, "passed"),
        "test_ini": (1024, "failed"),
    }
    assert all(test["expectation"]["max_leak"] == 0 for test in tests.values())


def test_each_gpu_model_is_a_test_of_its_own(project: Project) -> None:
    project.write(
        test_models="""
        @pytest.mark.gpumem(gpu=["T4", "A100-40GB"])
        @pytest.mark.parametrize("size", [1, 2])
        def test_list(size):
            torch.empty(size, device="cuda")

        @pytest.mark.gpumem(gpu="L4")
        def test_one():
            torch.empty(1, device="cuda")
        """
    )

    tests = project.report()

    models = {id_.partition("::")[2]: test["environment"]["gpu"] for id_, test in tests.items()}
    assert models == {
        "test_list[1-T4]": "T4",
        "test_list[1-A100-40GB]": "A100-40GB",
        "test_list[2-T4]": "T4",
        "test_list[2-A100-40GB]": "A100-40GB",
        "test_one": "L4",
    }


def test_several_models_on_the_command_line_run_every_measured_test(project: Project) -> None:
    project.write(
        test_models="""
        @pytest.mark.gpumem
        def test_marked():
            torch.empty(1, device="cuda")

        def test_plain():
            pass
        """
    )

    result = project.run("--collect-only", "-q", device="--gpumem-device=sim:T4,L4")

    result.stdout.fnmatch_lines(
        ["test_models.py::test_marked?T4?", "test_models.py::test_marked?L4?", "*::test_plain"]
    )


def test_a_list_of_models_is_refused_for_tests_without_parameters(project: Project) -> None:
    project.write(
        test_models="""
        import unittest

        @pytest.mark.gpumem(gpu=["T4", "L4"])
        class TestCase(unittest.TestCase):
            def test_case(self):
                pass
        """,
        test_params="""
        LIST = pytest.mark.gpumem(gpu=["T4", "L4"])

        @pytest.mark.parametrize("x", [pytest.param(1, marks=LIST)])
        def test_param(x):
            pass
        """,
    )

    result = project.run("--continue-on-collection-errors")

    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "test_models.py::TestCase::test_case: gpumem marker: gpu=?'T4', 'L4'? asks for a test*",
            "test_params.py::test_param?1?: gpumem marker: gpu=?'T4', 'L4'? asks for a test id*",
        ]
    )


@pytest.mark.parametrize("min_memory", ["14GiB", "16GiB"])
def test_a_test_is_skipped_where_the_gpu_is_too_small(project: Project, min_memory: str) -> None:
    project.write(
        test_memory=f"""
        @pytest.mark.gpumem(gpu="T4", min_memory="{min_memory}")
        def test_memory():
            torch.empty(1, device="cuda")
        """
    )

    result = project.run("-rs")

    if min_memory == "16GiB":
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*needs a GPU of 16.00 GiB, and T4 has 1*GiB"])
    else:
        result.assert_outcomes(skipped=0, passed=1)


def test_an_absent_cuda_device_is_reported_in_one_sentence(project: Project) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    project.write(
        test_cuda="""
        @pytest.mark.gpumem
        def test_cuda():
            pass

        def test_plain():
            pass
        """
    )

    result = project.run(device="--gpumem-device=cuda")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --gpumem-device=cuda, but torch * sees no CUDA device; write --gpumem-device=au*"]
    )
    result.assert_outcomes()
    project.run("-k", "plain", device="--gpumem-device=cuda").assert_outcomes(
        passed=1, deselected=1
    )


@pytest.mark.parametrize("args", [("--collect-only",), ("-k", "plain")], ids=["collect", "plain"])
def test_without_a_measured_test_neither_torch_nor_nvml_is_imported(
    project: Project, args: tuple[str, ...]
) -> None:
    project.path.joinpath("test_light.py").write_text(
        """
import pytest

@pytest.mark.gpumem(max="1GB", gpu=["T4", "L4"])
def test_marked(gpumem):
    pass

def test_plain():
    pass
"""
    )
    project.path.joinpath("conftest.py").write_text(
        """
import sys

def pytest_unconfigure(config):
    heavy = {"torch", "pynvml", "jsonschema"} & sys.modules.keys()
    print("imported:", sorted(heavy))
"""
    )

    result = project.run_anew("-s", *args)

    assert result.ret == 0
    result.stdout.fnmatch_lines(["*imported: []*"])


def test_a_suite_without_marked_tests_imports_little_of_the_plugin(project: Project) -> None:
    project.path.joinpath("test_light.py").write_text("def test_plain():\n    pass\n")
    project.path.joinpath("conftest.py").write_text(
        """
import sys

def pytest_unconfigure(config):
    print("imported:", *sorted(name for name in sys.modules if name.startswith("pytest_gpumem.")))
"""
    )

    result = project.run_anew("-s", device="--gpumem-device=auto")

    rooms = (
        "cached_answers device device.host_gpus device.select hookspecs late_modules"
        " option_values options paths plugin quoting report report.header"
        " report.pytest_reports session session.collection session.context session.expected"
        " session.results session.session"
    )
    names = " ".join(f"pytest_gpumem.{name}" for name in rooms.split())
    result.stdout.fnmatch_lines([f"*imported: {names}"])


def test_an_ordinary_suite_runs_unchanged(project: Project) -> None:
    project.write(
        test_plain="""
        def test_plain():
            assert torch.ones(2).sum() == 2
        """
    )

    result = project.run()

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= gpumem =*")
