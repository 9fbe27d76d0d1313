"""GitHub's annotation is on the line that grew, where the pull request changes that line."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.report.github import changed_lines, workflow_commands
from pytest_gpumem.report.record import ReportedRun, TestRecord
from tests.report.example_run import MIB, measured, record, verdict


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=me", "-c", "user.email=me@localhost")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def pull_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a clone whose branch changes line 2 of ``src/model.py`` and whose base went on."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    (origin / "src").mkdir(parents=True)
    git(origin, "init", "-q", "-b", "main")
    (origin / "src/model.py").write_text("one\ntwo\nthree\n")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "first")
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    (origin / "src/other.py").write_text("later\n")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "of others")
    git(clone, "fetch", "-q")
    (clone / "src/model.py").write_text("one\n2\nthree\n")
    git(clone, "commit", "-qam", "change")
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(clone))
    return clone


def grown(*sites: str) -> TestRecord:
    lines = [
        {"bytes": (9 - at) * MIB, "change": "new", "category": "activations", "site": site}
        for at, site in enumerate(sites)
    ]
    over = verdict("baseline", 80 * MIB, 64 * MIB, reference=64 * MIB)
    explained = replace(over, explanation=tuple(lines), cause="model.py:2 takes 9.0 MiB more")
    return record("test_model.py::test_x", measured(80 * MIB), explained, outcome="failed")


def annotation(pull_request: Path, test: TestRecord) -> str:
    lines = {test.nodeid: ("test_model.py", 12)}
    (command,) = workflow_commands(ReportedRun([test], pull_request / "src", lines))
    return command


def test_changed_lines_are_those_of_the_branch_alone(pull_request: Path) -> None:
    assert changed_lines(pull_request / "src") == (pull_request, {"src/model.py": {2}})


def test_a_line_that_grew_and_is_changed_has_the_annotation(pull_request: Path) -> None:
    command = annotation(pull_request, grown("model.py:3", "model.py:2"))
    assert command.startswith("::error file=src/model.py,line=2,title=GPU memory%3A test_model")
    assert "::test_model.py::test_x%0Amodel.py:2 takes 9.0 MiB more%0A" in command


def test_where_no_changed_line_grew_the_test_has_it(pull_request: Path) -> None:
    command = annotation(pull_request, grown("model.py:3"))
    assert command.startswith("::error file=src/test_model.py,line=12,")


@pytest.mark.parametrize("base", ["", "gone"])
def test_without_its_base_a_branch_has_no_changed_lines(
    pull_request: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("GITHUB_BASE_REF", base)
    assert changed_lines(pull_request) is None
    assert "file=src/test_model.py,line=12" in annotation(pull_request, grown("model.py:2"))
