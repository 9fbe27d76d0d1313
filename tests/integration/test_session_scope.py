"""``--gpumem-sim-scope=session``: a GPU wherever a suite asks whether there is one."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

CONFTEST = """
    import os

    with open(os.path.join(os.path.dirname(__file__), "answers.txt"), "a") as answers:
        where = os.environ.get("PYTEST_XDIST_WORKER", "main")
        answers.write(f"{where} {torch.cuda.is_available()}\\n")
"""
CONSTANTS = 'torch_device = "cuda" if torch.cuda.is_available() else "cpu"\n'
TEST = """
    from constants import torch_device

    @pytest.mark.gpumem
    @pytest.mark.skipif(torch_device != "cuda", reason="needs a GPU")
    def test_it():
        assert torch.empty(1024, device=torch_device).is_cuda

    def test_unmarked():
        assert torch.cuda.is_available()
"""


def answers(project: Project) -> list[str]:
    return sorted((project.path / "answers.txt").read_text().splitlines())


@pytest.fixture
def suite(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    # This suite may run under pytest-xdist itself.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    project.write(
        conftest=CONFTEST + "    from constants import torch_device\n",
        constants=CONSTANTS,
        test_it=TEST,
    )
    return project


def test_a_conftest_finds_the_gpu(suite: Project) -> None:
    suite.run_apart("--gpumem-sim-scope=session").assert_outcomes(passed=2)

    assert answers(suite) == ["main True"]


def test_the_ini_file_sets_the_session_scope_too(suite: Project) -> None:
    suite.write_ini("gpumem_sim_scope = session")

    suite.run_apart().assert_outcomes(passed=2)

    assert answers(suite) == ["main True"]


def test_workers_find_the_gpu_and_their_controller_does_not(suite: Project) -> None:
    suite.run_apart("--gpumem-sim-scope=session", "-n2").assert_outcomes(passed=2)

    assert answers(suite) == ["gw0 True", "gw1 True", "main False"]


def test_a_conftest_finds_no_gpu_without_the_session_scope(suite: Project) -> None:
    suite.run_apart().assert_outcomes(skipped=1, failed=1)

    assert answers(suite) == ["main False"]


def test_the_process_has_no_gpu_after_the_session(suite: Project) -> None:
    import torch

    suite.run("--gpumem-sim-scope=session")

    assert not torch.cuda.is_available()


def test_a_wrong_setting_is_a_usage_error(suite: Project) -> None:
    result = suite.run_apart("--gpumem-sim-scope=session", "--gpumem-tolerance=much")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpumem-tolerance=*"])
    result.stderr.no_fnmatch_line("*Traceback*")


def test_allocator_settings_of_a_conftest_apply(project: Project) -> None:
    project.write(
        conftest="""
    import os

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    """,
        test_it="""
    def test_it(gpumem):
        assert torch.cuda.is_available()
        torch.empty(1024, device=gpumem.device)
        assert torch.cuda.memory_reserved() == 2 * 1024 * 1024
    """,
    )

    tests = project.report("--gpumem-sim-scope=session", apart=True)

    (test,) = tests.values()
    assert test["environment"]["alloc_conf"] == "expandable_segments:True"


def test_an_unmarked_test_that_needs_values_names_the_option(project: Project) -> None:
    body = """
        import pytest
        import torch

        def test_plain():
            assert (torch.rand(3, device="cuda") < 2).all()

        @pytest.mark.gpumem
        def test_marked():
            assert (torch.rand(3, device="cuda") < 2).all()
    """
    project.write(test_values=body)
    result = project.run_apart("--gpumem-sim-scope=session", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert (
        "only shapes are computed; mark the test with @pytest.mark.gpumem, so that values are "
        "computed where it needs them, or run with --gpumem-sim-values=always"
    ) in result.stdout.str()
    result = project.run_apart("--gpumem-sim-scope=session", "--gpumem-sim-values=always")
    result.assert_outcomes(passed=2)
