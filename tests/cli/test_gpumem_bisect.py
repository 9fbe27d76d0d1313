from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpumem.cli.bisect import (
    Search,
    UnmeasuredError,
    commits_between,
    measured_at,
    work_tree,
)
from pytest_gpumem.sizes import parse_tolerance
from pytest_gpumem.values.measurement import Measurement
from tests.cli.test_gpumem_compare import Gpumem, Refusal, gpumem, refusal  # noqa: F401
from tests.cli.test_gpumem_history import Commits, commits  # noqa: F401

pytestmark = pytest.mark.usefixtures("forked_python")

MIB = 1024**2
REPOSITORY = Path(__file__).parents[2]
TEST = """
import pytest, torch
from net import keep

@pytest.mark.gpumem(max="1GiB")
def test_step():
    kept = keep(torch.empty(1024, 1024, device="cuda"))
"""
NET = "def keep(x):\n    return [x * 2]\n"
GROWN = "def keep(x):\n    return [x * 2, x.exp(), x.exp()]\n"


def peak(nbytes: int) -> Measurement:
    return Measurement("cuda:0", True, nbytes, 0, 0, 0, 0, 0)


def search(measure: Callable[[int], int | None], commits: int, tolerance: str = "0") -> Search:  # noqa: F811
    def measured(commit: str) -> Measurement:
        found = measure(int(commit))
        if found is None:
            raise UnmeasuredError("it does not import")
        return peak(found)

    return Search([str(n) for n in range(commits)], measured, parse_tolerance(tolerance))


@pytest.mark.parametrize("commits", [2, 3, 7, 63, 64, 65])
def test_every_planted_commit_is_found_in_few_runs(commits: int) -> None:  # noqa: F811
    for planted in range(1, commits):
        found = search(lambda at, planted=planted: 100 + 50 * (at >= planted), commits)  # type: ignore[misc]
        assert found.first_bad() == range(planted, planted + 1)
        assert found.runs <= math.ceil(math.log2(commits)) + 1
        assert {planted, planted - 1} <= found.found.keys()  # both are measured, to be compared


def test_a_test_that_did_not_grow_has_no_guilty_commit() -> None:
    assert search(lambda at: 100, 64).first_bad() == range(1)
    assert search(lambda at: 100 - at, 64).first_bad() == range(1)


def test_growth_within_the_tolerance_does_not_count() -> None:
    assert search(lambda at: MIB + 512 * at, 8, "4KiB").first_bad() == range(1)
    assert search(lambda at: MIB + 512 * at + 8192 * (at > 4), 8, "4KiB").first_bad() == range(5, 6)


def test_commits_that_cannot_be_measured_are_skipped() -> None:
    found = search(lambda at: None if at in (31, 32) else 100 + (at >= 40) * 50, 64)
    assert found.first_bad() == range(40, 41)
    assert found.failed == {31: "it does not import"}


def test_all_candidates_are_listed_where_skipped_commits_hide_one() -> None:
    found = search(lambda at: None if 30 <= at < 34 else 100 + (at >= 32) * 50, 64)
    assert found.first_bad() == range(30, 35)


def test_a_bad_commit_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UnmeasuredError, match="does not import"):
        search(lambda at: None, 4).first_bad()


def test_the_planted_commit_is_found_among_64(commits: Commits) -> None:  # noqa: F811
    """The repository's suite is one number in a file."""
    ids = []
    for number in range(64):
        (commits.path / "peak").write_text(f"{(8 + 8 * (number >= 41)) * MIB}\n# {number}\n")
        commits.commit(f"change {number}")
        ids.append(commits.git("rev-parse", "HEAD"))
    between = commits_between(commits.path, ids[0], "HEAD")
    assert between == ids
    with work_tree(commits.path) as tree:

        def measure(commit: str) -> Measurement:
            commits.git("-C", str(tree), "checkout", "--quiet", "--detach", commit)
            return peak(int((tree / "peak").read_text().split()[0]))

        found = Search(between, measure, parse_tolerance("0"))
        (guilty,) = found.first_bad()
    assert between[guilty] == ids[41]
    assert found.runs <= 7
    assert not tree.exists()
    assert len(commits.git("worktree", "list").splitlines()) == 1


@pytest.fixture
def project(commits: Commits, monkeypatch: pytest.MonkeyPatch) -> Commits:  # noqa: F811
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    (commits.path / "pytest.ini").write_text("[pytest]\n")
    (commits.path / "test_net.py").write_text(TEST)
    (commits.path / "net.py").write_text(NET)
    commits.commit("begin")
    commits.commit("documentation")
    (commits.path / "net.py").write_text(GROWN)
    return commits


def test_the_guilty_commit_is_shown_with_its_lines(gpumem: Gpumem, project: Commits) -> None:  # noqa: F811
    guilty = project.commit("keep the masks")
    (project.path / "net.py").write_text(GROWN + "# uncommitted\n")
    code, lines = gpumem("bisect", "test_net.py::test_step", "--good", "HEAD~2", "--gpu", "T4")
    assert code == 1
    assert [line.split("  ")[1] for line in lines[:2]] == ["16.0 MiB", "8.0 MiB"]
    at = next(n for n, line in enumerate(lines) if "made it grow" in line)
    assert lines[at].startswith(f"{guilty} keep the masks (a, ")
    assert lines[at + 1 :] == [
        "  from 8.0 MiB (8,388,608 B) to 16.0 MiB (16,777,216 B), +8.0 MiB (+100.0 %)",
        "  +8.0 MiB  temporaries  net.py:2  torch.exp  2 × 4.0 MiB float32 (new)",
        "2 runs among 3 commits",
    ]
    assert project.git("status", "--short") == "M net.py"
    assert len(project.git("worktree", "list").splitlines()) == 1


def test_a_target_of_several_tests_is_refused(refusal: Refusal, project: Commits) -> None:  # noqa: F811
    (project.path / "test_net.py").write_text(TEST + TEST.replace("test_step", "test_other"))
    project.commit("two tests")
    assert refusal("bisect", "test_net.py", "--good", "HEAD~1") == (
        "gpumem: test_net.py are 2 tests, give one of test_net.py::test_other, "
        "test_net.py::test_step"
    )
    assert len(project.git("worktree", "list").splitlines()) == 1


def test_the_commit_is_measured_and_not_an_installed_copy(
    gpumem: Gpumem,  # noqa: F811
    project: Commits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's own work tree is first on the path, as it is after an editable install."""
    project.commit("keep the masks")
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    _, lines = gpumem("bisect", "test_net.py::test_step", "--good", "HEAD~1", "--gpu", "T4")
    assert [line.split("  ")[1] for line in lines[:2]] == ["16.0 MiB", "8.0 MiB"]


def test_an_absent_test_is_refused(project: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    project.commit("grow")
    monkeypatch.chdir(project.path)
    with pytest.raises(UnmeasuredError, match=r"not found: .*test_gone"):
        measured_at("HEAD", project.path, project.path, "test_net.py::test_gone", "T4")


def test_json_has_the_guilty_commit_and_the_measurements(
    capsys: pytest.CaptureFixture[str],
    project: Commits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pytest_gpumem.cli import main

    project.commit("keep the masks")
    monkeypatch.chdir(project.path)
    arguments = ["--good", "HEAD~1", "--json", "--pytest-args", "-p no:randomly -k step"]
    assert main(["bisect", "test_net.py", *arguments]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["guilty"] == [project.git("rev-parse", "HEAD")]
    assert (data["runs"], data["commits"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--good", "v9"), "'v9' is no commit of this repository"),
        (("--good", "HEAD"), "HEAD does not come after HEAD: no commit lies between them"),
        (("--good", "HEAD~1", "--tolerance", "x"), "--tolerance: 'x' is not a tolerance"),
        (("--good", "HEAD~1", "--pytest-args", "'"), "--pytest-args: No closing quotation"),
    ],
)
def test_bad_input_is_one_sentence(
    refusal: Refusal,  # noqa: F811
    commits: Commits,  # noqa: F811
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    commits.commit("one")
    commits.commit("two")
    assert refusal("bisect", "t.py::test_x", *arguments).startswith(f"gpumem: {sentence}")
