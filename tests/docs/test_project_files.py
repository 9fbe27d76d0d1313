"""Files that only GitHub or pre-commit read are well-formed and name things that exist."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).parent.parent.parent
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
FILES = [*GITHUB.rglob("*.yml"), REPOSITORY / "action.yml", REPOSITORY / ".pre-commit-config.yaml"]
TOX = configparser.ConfigParser()
TOX.read(REPOSITORY / "tox.ini", encoding="utf-8")

Json = dict[Any, Any]


def read(path: Path) -> Json:
    content: Json = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def named(path: Path) -> str:
    return path.name


def steps(path: Path) -> Iterator[Json]:
    for job in read(path)["jobs"].values():
        yield from job["steps"]


def commands(path: Path) -> Iterator[str]:
    """Return every line that a workflow runs, with the values of its matrix."""
    for step in steps(path):
        yield from step.get("run", "").splitlines()


def mappings(node: Any) -> Iterator[Any]:
    """Yield every mapping in a file, as PyYAML composes it."""
    if node.id == "mapping":
        yield node
        for _, value in node.value:
            yield from mappings(value)
    elif node.id == "sequence":
        for value in node.value:
            yield from mappings(value)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_is_yaml_without_duplicate_keys(path: Path) -> None:
    found = list(mappings(yaml.compose(path.read_text(encoding="utf-8"))))
    assert found
    for mapping in found:
        keys = [key.value for key, _ in mapping.value]
        assert len(keys) == len(set(keys)), keys


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_a_workflow_has_triggers_runners_and_permissions(path: Path) -> None:
    workflow = read(path)
    # YAML 1.1, which PyYAML reads, takes the key "on" for true.
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_every_action_has_a_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", action) for action in used), used


def test_every_python_and_every_torch_release_is_tested() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    pythons = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    releases = set(re.findall(r"^\s*(torch\d+): torch==", TOX["testenv"]["deps"], re.M))
    rows = read(GITHUB / "workflows" / "ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == pythons
    environments = {row["environment"] for row in rows}
    assert {name.removesuffix("-whole") for name in environments} - {"coverage", "dry"} == releases


def test_tox_environments_that_are_run_exist() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    environments = jobs["lint"]["strategy"]["matrix"]["environment"]
    assert all(TOX.has_section(f"testenv:{name}") for name in environments)
    assert "python -m tox -e ${{ matrix.environment }}" in [
        step.get("run") for step in jobs["lint"]["steps"]
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_the_files_that_a_workflow_runs_exist(path: Path) -> None:
    words = [word for line in commands(path) for word in shlex.split(line, comments=True)]
    ours = [word for word in words if re.match(r"(tests|benchmarks|examples)\b", word)]
    assert all((REPOSITORY / word).exists() for word in ours), ours


def test_no_pull_request_runs_code_on_the_machine_with_the_gpu() -> None:
    workflow = read(GITHUB / "workflows" / "gpu.yml")
    assert workflow[True].keys() == {"push", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "gpu"]
    ran = " ".join(commands(GITHUB / "workflows" / "gpu.yml"))
    assert all(one in ran for one in ("gpumem env", "tests/gpu", "benchmarks/twin.py"))
    kept = job["steps"][-1]["with"]["path"].split()
    assert "benchmarks/evidence/*.json" in kept


def test_a_release_is_uploaded_without_a_token() -> None:
    path = GITHUB / "workflows" / "release.yml"
    publish = read(path)["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert "secrets." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FORMS, ids=named)
def test_an_issue_form_is_valid_for_github(path: Path) -> None:
    form = read(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in fields)
    env = next(field for field in fields if field["id"] == "env")
    assert "gpumem env" in env["attributes"]["label"]
    assert env["validations"] == {"required": True}


def test_the_form_for_a_wrong_number_asks_for_its_program() -> None:
    fields = read(GITHUB / "ISSUE_TEMPLATE" / "number.yml")["body"]
    required = [one["id"] for one in fields if one.get("validations", {}).get("required")]
    assert required == ["env", "program", "numbers", "metric"]


def test_pre_commit_runs_what_tox_runs() -> None:
    (repository,) = read(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    hooks = {" ".join(hook["entry"].split()) for hook in repository["hooks"]}
    lint = TOX["testenv:lint"]["commands"].strip().splitlines()
    linted = [line for line in lint if not line.startswith("#")]
    expected = {
        re.sub(r" --check| \.$| pytest_gpumem benchmarks$", "", line)
        + (" --force-exclude" if line.startswith("ruff") else "")
        for line in linted
    }
    assert hooks == expected


def test_style_and_types_are_checked_for_the_oldest_python() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=3\.(\d+)"', project, re.M)
    assert f'target-version = "py3{oldest}"' in project
    assert sys.version_info >= (3, int(oldest))
