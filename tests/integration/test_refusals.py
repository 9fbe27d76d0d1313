"""Mistyped options and settings are refused in one sentence with a suggestion."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (
            "--gpumem-update-baselines=yes",
            "ERROR: --gpumem-update-baselines='yes' is not accepted; write all or new",
        ),
        (
            "--gpumem-history=bad",
            "ERROR: --gpumem-history='bad' is not accepted; write python or all",
        ),
        (
            "--gpumem-rows=many",
            "ERROR: --gpumem-rows='many' is not a number of rows; write one like 50, or all",
        ),
        (
            "--gpumem-sort=size",
            "ERROR: --gpumem-sort='size' is not accepted; write peak or leaked or over or name",
        ),
    ],
)
def test_a_mistyped_option_is_refused(project: Project, argument: str, sentence: str) -> None:
    result = project.run(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sentence in result.errlines


def test_a_mistyped_option_in_pytest_addopts_gets_a_suggestion(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--gpumem-history=bad")
    sentence = "ERROR: --gpumem-history='bad' is not accepted; write python or all"
    assert sentence in project.run().errlines


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("gpumem_max_leek = 0", "'gpumem_max_leek' * did you mean gpumem_max_leak?"),
        ("gpumem_tolerence = 1%", "'gpumem_tolerence' * did you mean gpumem_tolerance?"),
        ("gpumem_xyz = 1", "'gpumem_xyz' * see pytest --help"),
    ],
)
def test_a_mistyped_ini_setting_is_refused_with_a_suggestion(
    project: Project, setting: str, meant: str
) -> None:
    project.write_ini(setting)
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *tox.ini: {meant}"])


def test_tests_of_the_cpu_pass_without_torch(project: Project) -> None:
    (project.path / "conftest.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
    )
    (project.path / "test_cpu.py").write_text("def test_sum():\n    assert 1 + 1 == 2\n")

    result = project.run_apart("--gpumem-all")

    result.assert_outcomes(passed=1)
    assert "note: --gpumem-all measured no test, because torch is not installed" in result.outlines
