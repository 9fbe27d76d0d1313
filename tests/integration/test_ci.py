"""Reports of a run to the CI system it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_project import Project

GREW = """
    @pytest.mark.gpumem(max="1MiB")
    def test_a():
        x = torch.empty(2 * 2**20, dtype=torch.uint8, device="cuda")
"""
ERROR = (
    "::error file=test_it.py,line=4,title=GPU memory%3A test_it.py%3A%3Atest_a::the test peaked at"
)


@pytest.fixture
def summary(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    path = project.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    project.write(test_it=GREW)
    return path


def test_github_gets_annotations_and_a_summary_by_default(project: Project, summary: Path) -> None:
    result = project.run()
    assert sum(line.startswith(ERROR) for line in result.outlines) == 1
    assert "| `test_it.py::test_a` | 2.0 MiB | limit 1.0 MiB | +1.0 MiB (+100.0 %) |" in (
        summary.read_text()
    )


def test_a_run_with_workers_writes_annotations_once(project: Project, summary: Path) -> None:
    result = project.run_apart("-n1")
    assert sum(line.startswith(ERROR) for line in result.outlines) == 1
    assert summary.read_text().count("pytest-gpumem") == 1


def test_report_off_writes_nothing_for_ci(project: Project, summary: Path) -> None:
    result = project.run("--gpumem-report=off")
    assert not any(line.startswith("::") for line in result.outlines)
    assert not summary.exists()


def test_a_run_without_measured_tests_writes_nothing(project: Project, summary: Path) -> None:
    project.write(test_it="def test_a(): ...")
    project.run()
    assert not summary.exists()


def test_gitlab_gets_markdown_by_default(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("CI_PROJECT_DIR", str(project.path))
    project.write(test_it=GREW)
    project.run()
    assert "1 of 1 test failed" in (project.path / "gpumem.md").read_text()


def test_markdown_that_cannot_be_written_fails_the_run(project: Project) -> None:
    project.write(test_it=GREW.replace("1MiB", "4MiB"))
    result = project.run(f"--gpumem-report=markdown:{project.path}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["note: * because report * cannot be written: Is a directory; *"])


def test_hostile_names_are_shown_as_text_in_every_report(project: Project, summary: Path) -> None:
    project.write(
        test_it="""
            NAMES = ["<script>", "\\x1b[31m", "a\\n::error::b", "`c`|d\\\\|e", "::warning::f"]

            @pytest.mark.gpumem(max="1MiB")
            @pytest.mark.parametrize("name", NAMES)
            def test_a(name):
                x = torch.empty(2 * 2**20, dtype=torch.uint8, device="cuda")
        """
    )
    result = project.run()
    commands = [line for line in result.outlines if line.lstrip().startswith("::")]
    assert len(commands) == 5
    assert all(line.startswith("::error file=test_it.py,line=6,title=GPU") for line in commands)
    assert all(line.isprintable() for line in commands)
    text = summary.read_text()
    outside = "".join(text.split("```")[::2])
    assert "\x1b" not in text
    assert "`test_it.py::test_a[<script>]`" in outside
    assert "<script" not in outside.replace("`test_it.py::test_a[<script>]`", "")
    rows = [line for line in text.splitlines() if line.endswith("+1.0 MiB (+100.0 %) |")]
    assert [row.count("|") for row in rows] == [5] * 5
