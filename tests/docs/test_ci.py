"""The workflows of docs/ci.md and the action: YAML whose parts fit each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("markdown_it")
yaml = pytest.importorskip("yaml")

from tests.docs.blocks import REPOSITORY, blocks  # noqa: E402  # needs markdown_it

BLOCKS = [block for block in blocks("docs/ci.md") if block.language == "yaml"]
TRIGGERS = True
"""The value of the key ``on`` in YAML 1.1, which PyYAML reads."""


def _documents(file: str) -> list[dict[Any, Any]]:
    return [yaml.safe_load(block.text) for block in BLOCKS if block.text.startswith(f"# {file}")]


GITHUB = _documents(".github/workflows/")
GITLAB = _documents(".gitlab-ci.yml")
ACTION = yaml.safe_load((REPOSITORY / "action.yml").read_text())


def _is_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_workflow_is_of_github_or_gitlab() -> None:
    assert len(BLOCKS) == len(GITHUB) + len(GITLAB)
    assert (len(GITHUB), len(GITLAB)) == (2, 2)


def _steps() -> Iterator[dict[str, Any]]:
    for workflow in GITHUB:
        for job in workflow["jobs"].values():
            yield from job["steps"]


@pytest.mark.parametrize("workflow", GITHUB, ids=lambda workflow: workflow["name"])
def test_a_github_workflow_has_triggers_permissions_and_jobs(workflow: dict[Any, Any]) -> None:
    assert workflow.keys() <= {"name", TRIGGERS, "permissions", "concurrency", "jobs"}
    assert workflow[TRIGGERS].keys() == {"push", "pull_request"}
    # action/comment.sh reads artifacts of runs, reads the code and writes a comment.
    assert workflow["permissions"] == {
        "actions": "read",
        "contents": "read",
        "pull-requests": "write",
    }
    for job in workflow["jobs"].values():
        assert job.keys() <= {"runs-on", "steps", "needs", "if"}
        assert {job.get("needs")} - {None} <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert len(step.keys() & {"run", "uses"}) == 1
            _is_shell(step.get("run", ""))


def test_workflows_give_the_action_only_inputs_that_it_declares() -> None:
    given = [step["with"] for step in _steps() if step.get("uses") == "./pytest-gpumem"]
    assert len(given) == 3
    assert all(one.keys() <= ACTION["inputs"].keys() for one in given)
    names = [one.get("name", "gpumem") for one in given]
    assert len(set(names)) == len(names)  # each job has a comment and an artifact of its own


def test_the_action_uses_only_inputs_that_it_declares() -> None:
    text = (REPOSITORY / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == ACTION["inputs"].keys()
    steps = ACTION["runs"]["steps"]
    assert all("shell" in step for step in steps if "run" in step)
    used = set(re.findall(r"steps\.(\w+)\.outputs\.(\w+)", text))
    written = (REPOSITORY / "action" / "tests.sh").read_text()
    assert used == {("tests", "report"), ("tests", "code")}
    assert all(f"{name}=" in written for _, name in used)
    for script in (REPOSITORY / "action").glob("*.sh"):
        _is_shell(script.read_text())


@pytest.mark.parametrize("step", ["tests.sh", "comment.sh"])
def test_a_script_is_given_every_variable_that_it_reads(step: str) -> None:
    script = (REPOSITORY / "action" / step).read_text()
    (given,) = (one["env"] for one in ACTION["runs"]["steps"] if step in one.get("run", ""))
    assert set(re.findall(r"\$\{?(GPUMEM_\w+)", script)) == given.keys() - {"GH_TOKEN"}


def test_gitlab_jobs_need_jobs_that_exist_and_keep_their_files() -> None:
    jobs = {name: job for document in GITLAB for name, job in document.items()}
    assert len(jobs) == sum(map(len, GITLAB))
    for name, job in jobs.items():
        whole = {**jobs[job["extends"]], **job} if "extends" in job else job
        assert whole.keys() <= {
            *("image", "script", "artifacts", "needs", "rules", "tags", "variables", "extends")
        }
        for line in whole["script"]:
            _is_shell(line)
        for needed in whole.get("needs", ()):
            source = jobs[needed["job"]]
            artifacts = {**jobs.get(source.get("extends", ""), {}), **source}["artifacts"]
            assert "gpumem.json" in artifacts["paths"], name
            assert whole["variables"]["OF"] == needed["job"]


def test_the_scripts_are_executable() -> None:
    modes = [Path(script).stat().st_mode for script in (REPOSITORY / "action").glob("*.sh")]
    assert len(modes) == 2
    assert all(mode & 0o111 for mode in modes)
