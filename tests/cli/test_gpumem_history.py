from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.report.past import PLAIN_BARS, Point, Trend, sparkline
from pytest_gpumem.sizes import parse_tolerance
from tests.cli.test_gpumem_compare import (  # noqa: F401
    MIB,
    T4,
    Gpumem,
    Refusal,
    gpumem,
    record,
    refusal,
    report,
)
from tests.stores import BaselineStore

GIB = 1024 * MIB


def trend(*peaks: int, tolerance: str = "1%") -> Trend:
    """Return a trend of ``peaks`` in kB: a percentage allows 512 B at least."""
    points = tuple(Point(str(at), "", 1000 * peak) for at, peak in enumerate(peaks))
    return Trend("sim-T4", "t.py::test_x", points, parse_tolerance(tolerance))


class Commits:
    """A repository whose commits record baselines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        ran = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.path,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
        )
        return ran.stdout.strip()

    def commit(self, subject: str, **peaks: int) -> str:
        """Record ``peaks`` as the baselines of tests; return the commit's abbreviated id."""
        entries = {name: BaselineEntry(peak, 0, 0, 0) for name, peak in peaks.items()}
        if entries:
            BaselineStore(self.path / "baselines").write(T4, "tests/test_a.py", entries)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        return self.git("rev-parse", "--short", "HEAD")


@pytest.fixture
def commits(tmp_path: Path) -> Commits:
    return Commits(tmp_path)


def test_a_step_exceeds_the_tolerance_and_a_creep_stays_below_it() -> None:
    found = trend(1000, 1010, 1500, 1510, 1520, 1400)
    assert [(step.point.label, step.bytes) for step in found.steps] == [
        ("2", 490_000),
        ("5", -120_000),
    ]
    assert [point.label for point in found.creeping] == ["1", "3", "4"]
    assert (found.crept, found.level) == (30_000, 1_370_000)


@pytest.mark.parametrize(
    ("peaks", "creeps"),
    [
        ((1000, 1010, 1020, 1030, 1040, 1050), False),  # just 5 %
        ((1000, 1010, 1020, 1030, 1040, 1050, 1051), True),
        ((1000, 1010, 1000, 1010, 1000, 1010), False),  # noise
        ((1000, 1100), False),  # a step
        ((1000, 1060, 1060), False),
        ((1000, 2000, 2020, 2040, 2060, 2080, 2100, 2101), True),  # 5.05 % of what the step left
    ],
)
def test_many_small_steps_creep(peaks: tuple[int, ...], creeps: bool) -> None:
    assert trend(*peaks).creeps(parse_tolerance("5%")) is creeps


def test_one_small_step_is_no_creep() -> None:
    assert not trend(1000, 1900, tolerance="100%").creeps(parse_tolerance("5%"))


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), 8, "▁▂▃▄▅▆▇█"),
        ((5, 5, 5), 8, "▁▁▁"),
        ((10, 20), 8, "▁█"),
        ((0, 0, 9, 0, 0, 0, 0, 0), 4, "▁█▁▁"),  # the peak is kept
    ],
)
def test_a_sparkline_keeps_the_peak(values: tuple[int, ...], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


def test_a_terminal_without_bars_gets_ascii_bars() -> None:
    assert sparkline((0, 7), 2, PLAIN_BARS) == "_#"


def test_an_output_in_ascii_gets_ascii_bars(tmp_path: Path) -> None:
    files = [
        str(report(tmp_path / f"{name}.json", record("test_x", peak)))
        for name, peak in (("before", 100 * MIB), ("after", 132 * MIB))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.cli", "history", *files],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[:2] == ["test_a.py::test_x", "_#"]


def test_reports_are_read_in_the_given_order(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    files = [
        str(report(tmp_path / f"{name}.json", record("test_x", peak), record("test_y", MIB)))
        for name, peak in (("b", 100 * MIB), ("a", 132 * MIB), ("c", 132 * MIB))
    ]
    code, lines = gpumem("history", *files)
    assert code == 0
    assert lines == [
        "test               trend      first       last     change      %  steps  crept",
        "test_a.py::test_x  ▁██    100.0 MiB  132.0 MiB  +32.0 MiB  +32.0      1    0 B",
        "",
        "test_a.py::test_x:",
        "  +32.0 MiB (+32.0 %)  a",
        "2 tests at 3 moments: 1 never changed, 1 with steps, 0 creeping",
    ]


@pytest.mark.parametrize(
    ("own", "given", "code", "said"),
    [
        # No change (100, 108, 116, 124) fails a test that tolerates 10 %; only a creep shows them.
        ("10%", [], 1, "test_a.py::test_x crept by +24.0 MiB (+24.0 %) in 3 small steps"),
        ("10%", ["--tolerance", "1%"], 0, "0 creeping"),
        # With a tolerance of 0, the changes are steps.
        ("0", [], 0, "1 test at 4 moments: 0 never changed, 1 with steps, 0 creeping"),
    ],
)
def test_small_steps_below_a_test_s_tolerance_are_a_creep(
    own: str,
    given: list[str],
    code: int,
    said: str,
    gpumem: Gpumem,  # noqa: F811
    tmp_path: Path,
) -> None:
    for number, peak in enumerate((100, 108, 116, 124)):
        one = record("test_x", peak * MIB, expectation={"tolerance": own})
        report(tmp_path / "kept" / f"run-{number}.json", one)
    found, lines = gpumem("history", "kept", *given)
    assert found == code
    assert said in lines[-2] + lines[-1]


def test_a_baseline_stores_the_tolerance_of_its_test(
    gpumem: Gpumem,  # noqa: F811
    commits: Commits,
) -> None:
    for peak in (100, 108, 116):
        entry = BaselineEntry(peak * MIB, 0, 0, 0, tolerance="10%")
        BaselineStore(commits.path / "baselines").write(T4, "tests/test_a.py", {"test_x": entry})
        commits.commit(f"to {peak}")
    code, lines = gpumem("history", "--git", "HEAD")
    assert code == 1
    assert "tests/test_a.py::test_x crept by +16.0 MiB (+16.0 %) in 2 small steps" in lines[-2]


def test_reports_of_a_folder_are_sorted_by_number(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "kept").mkdir()
    for number, peak in ((9, MIB), (10, 3 * MIB), (100, 2 * MIB)):
        report(tmp_path / "kept" / f"run-{number}.json", record("test_x", peak))
    _, lines = gpumem("history", "--json", "kept")
    (test,) = json.loads("\n".join(lines))["tests"]
    assert [point["label"] for point in test["points"]] == ["run-9", "run-10", "run-100"]


def test_a_test_whose_body_failed_is_left_out(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    files = [
        str(report(tmp_path / "a.json", record("test_x", 2 * MIB))),
        str(report(tmp_path / "b.json", record("test_x", 512, outcome="failed", judged=False))),
    ]
    assert gpumem("history", *files)[1] == [
        "1 test at 2 moments: 1 never changed, 0 with steps, 0 creeping"
    ]


def test_a_git_range_names_the_commit_of_each_step(
    gpumem: Gpumem,  # noqa: F811
    commits: Commits,
) -> None:
    commits.commit("begin", test_x=GIB)
    commits.commit("documentation")
    grew = commits.commit("keep the\x1b[31m masks", test_x=2 * GIB)
    fell = commits.commit("free them", test_x=GIB)
    code, lines = gpumem("history", "--git", "HEAD")
    assert code == 0
    assert lines[1].split()[:2] == ["tests/test_a.py::test_x", "▁█▁"]
    assert lines[3:6] == [
        "tests/test_a.py::test_x:",
        f"  +1.00 GiB (+100.0 %)  {grew} keep the\\x1b[31m masks",
        f"  -1.00 GiB (-50.0 %)  {fell} free them",
    ]


def test_a_range_begins_with_the_baselines_stored_before_it(
    gpumem: Gpumem,  # noqa: F811
    commits: Commits,
) -> None:
    commits.commit("begin", test_x=GIB)
    step = commits.commit("grow", test_x=2 * GIB)
    _, lines = gpumem("history", "--git", "HEAD~1..HEAD", "--json")
    (test,) = json.loads("\n".join(lines))["tests"]
    assert test["steps"] == [{"label": step, "subject": "grow", "bytes": GIB}]


def test_a_slow_creep_is_exit_code_1(gpumem: Gpumem, commits: Commits) -> None:  # noqa: F811
    ids = [commits.commit(f"change {n}", test_x=GIB + n * 8 * MIB) for n in range(8)]
    code, lines = gpumem("history", "--git", "HEAD")
    assert code == 1
    assert lines[-2] == (
        "tests/test_a.py::test_x crept by +56.0 MiB (+5.5 %) in 7 small steps, more than 5%: "
        + ", ".join(ids[1:])
    )
    assert gpumem("history", "--git", "HEAD", "--max-creep", "6%")[0] == 0


def test_a_damaged_file_is_left_out_and_reported(gpumem: Gpumem, commits: Commits) -> None:  # noqa: F811
    commits.commit("begin", test_x=GIB)
    (file,) = (commits.path / "baselines").rglob("*.json")
    whole = file.read_text()
    file.write_text("<<<<<<< HEAD\n" + whole)
    commits.commit("bad merge")
    file.write_text(whole.replace(str(GIB), str(2 * GIB)))
    commits.commit("repaired")
    _, lines = gpumem("history", "--git", "HEAD")
    assert "▁█" in lines[1]
    assert lines[-1].startswith("note: left out of commit ")
    assert "not valid JSON" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give either reports or --git RANGE; see gpumem history --help"),
        (("--git", "v9..HEAD"), "git: bad revision 'v9..HEAD'"),
        (("--git=--output=x",), "git: "),
        (("--git", "HEAD", "--baselines", "b"), "no commit of 'HEAD' stored baselines in "),
        (("--git", "HEAD", "--max-creep", "much"), "--max-creep: 'much' is not a tolerance"),
        (("absent.json",), "report absent.json cannot be read"),
        (("empty",), "empty holds no reports"),
    ],
)
def test_bad_input_is_one_sentence(
    refusal: Refusal,  # noqa: F811
    commits: Commits,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    (commits.path / "empty").mkdir()
    commits.commit("begin", test_x=GIB)
    assert refusal("history", *arguments).startswith(f"gpumem: {sentence}")


def test_a_folder_outside_a_repository_is_refused(refusal: Refusal) -> None:  # noqa: F811
    assert "not a git repository" in refusal("history", "--git", "HEAD")
