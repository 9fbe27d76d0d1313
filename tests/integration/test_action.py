"""The GitHub action's steps, run as shell scripts on two commits of a repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.docs.blocks import blocks
from tests.docs.release import NAMED_RELEASE
from tests.forked import quick
from tests.pytest_project import LOADED

REPOSITORY = Path(__file__).parents[2]
ACTION = REPOSITORY / "action"
FAKE_GH = REPOSITORY / "tests" / "fake_gh.py"

TEST = """
    import pytest
    import torch
    from net import activations

    @pytest.mark.gpumem(max="12MiB")
    def test_step():
        kept = activations(torch.empty(1024, 1024, device="cuda"))
"""
NEW = """
    import pytest
    import torch

    @pytest.mark.gpumem(max="1GiB")
    def test_inference():
        kept = torch.empty(256, 1024, device="cuda")
"""
NET = """
    def activations(x):
        return [x * 2]
"""
GROWN = """
    def activations(x):
        kept = [x * 2]
        kept += [x.exp() for _ in range(2)]
        return kept
"""


class Runner:
    """A job of GitHub Actions: a repository, a server, and the outputs of its steps."""

    def __init__(self, path: Path) -> None:
        self.repository, self.server = path / "repository", path / "server"
        self.path = path
        (self.server / "runs").mkdir(parents=True)
        (self.server / "comments.json").write_text(
            json.dumps([{"id": 1, "mine": False, "body": "<!-- pytest-gpumem -->\nnot ours"}])
        )
        self.repository.mkdir()
        tools = path / "bin"
        tools.mkdir()
        self._tool(tools / "gh", str(FAKE_GH))
        self._tool(tools / "gpumem", "-m", "pytest_gpumem.cli")
        command = [str(quick()), "-m", "pytest", *LOADED, "-p", "no:cacheprovider", "-q"]
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "FAKE_GH": str(self.server),
            "RUNNER_TEMP": str(path / "temp"),
            "GITHUB_OUTPUT": str(path / "output"),
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_BASE_REF": "main",
            "GITHUB_WORKFLOW_REF": "o/r/.github/workflows/ci.yml@refs/pull/7/merge",
            "GPUMEM_RUN": f"{shlex.join(command)} --gpumem-device=sim:T4",
            "GPUMEM_NAME": "gpumem",
            "GPUMEM_PULL": "7",
        }
        self.git("init", "--quiet")

    def _tool(self, path: Path, *arguments: str) -> None:
        path.write_text(f'#!/bin/sh\nexec {shlex.join([str(quick()), *arguments])} "$@"\n')
        path.chmod(0o755)

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=self.repository, check=True)

    def commit(self, **files: str) -> None:
        for name, source in files.items():
            (self.repository / f"{name}.py").write_text(dedent(source))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    def tests(self) -> dict[str, str]:
        """Run the step that runs the tests; return its outputs."""
        (self.path / "output").write_text("")
        self._step("tests.sh")
        lines = (self.path / "output").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def comment(self, outputs: dict[str, str]) -> str:
        """Run the step that writes the comment; return its printed output."""
        return self._step("comment.sh", GPUMEM_REPORT=outputs["report"])

    def _step(self, script: str, **environment: str) -> str:
        ran = subprocess.run(
            ["bash", str(ACTION / script)],
            cwd=self.repository,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def keep(self, run: str, outputs: dict[str, str]) -> None:
        """Store the report as actions/upload-artifact does on the branch ``main``."""
        shutil.copytree(Path(outputs["report"]).parent, self.server / "runs" / run / "gpumem")

    @property
    def comments(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.server / "comments.json").read_text())
        return found


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return Runner(tmp_path)


def test_two_commits_get_one_comment_that_is_updated(runner: Runner) -> None:
    runner.commit(test_net=TEST, net=NET)
    before = runner.tests()
    assert before["code"] == "0"
    runner.comment(before)
    _, first = runner.comments
    assert first["body"].startswith(
        "<!-- pytest-gpumem -->\n### GPU memory: 1 test measured, none failed by it\n"
    )
    assert "Against" not in first["body"]

    runner.keep("41", before)
    (runner.server / "runs" / "42" / "another").mkdir(parents=True)
    runner.commit(net=GROWN, test_inference=NEW)
    outputs = runner.tests()
    assert outputs["code"] == "1"
    runner.comment(outputs)
    foreign, ours = runner.comments
    assert foreign["body"].endswith("not ours")
    # 1024 x 1024 float32 are 4 MiB: the input and one copy, then two more.
    assert "| `test_net.py::test_step` | 8.0 MiB | 16.0 MiB | +8.0 MiB (+100.0 %) |" in ours["body"]
    (shown,) = [block.text for block in blocks("docs/ci.md") if block.language == "markdown"]
    assert re.sub(r"torch \d+\.\d+", f"torch {NAMED_RELEASE}", ours["body"]) == shown


def test_a_token_without_write_permission_is_a_warning(runner: Runner) -> None:
    (runner.server / "read-only").touch()
    runner.commit(test_net="def test_nothing(): ...")
    assert runner.comment(runner.tests()).startswith("::warning::pytest-gpumem: the pull request")


def test_failing_tests_are_reported_and_fail_the_last_step(runner: Runner) -> None:
    runner.commit(test_net=TEST.replace("12MiB", "4MiB"), net=NET)
    outputs = runner.tests()
    runner.comment(outputs)
    assert outputs["code"] == "1"
    assert "### GPU memory: 1 of 1 test failed" in runner.comments[1]["body"]


def test_tests_without_a_report_are_a_warning(runner: Runner) -> None:
    runner.environment["GPUMEM_RUN"] = "exit 3"
    outputs = runner.tests()
    assert outputs["code"] == "3"
    assert "wrote no report" in runner.comment(outputs)


@pytest.mark.parametrize("command", ["exit 3 | cat", "(exit 3)\ntrue"])
def test_a_failure_before_the_last_command_fails_the_tests(runner: Runner, command: str) -> None:
    runner.environment["GPUMEM_RUN"] = command
    assert runner.tests()["code"] == "3"


def test_the_action_runs_two_scripts_and_expands_nothing_in_a_shell() -> None:
    text = (REPOSITORY / "action.yml").read_text()
    assert re.findall(r"GITHUB_ACTION_PATH/([\w/.]+)", text) == [
        "action/tests.sh",
        "action/comment.sh",
    ]
    assert not [line for line in re.findall(r"\brun: (.*)", text) if "${{" in line]
