"""``gpumem bisect TEST --good REV``: the commit that made a test's memory grow."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import explain
from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import change_text
from pytest_gpumem.cli.command import Answer, Argument, Command, parsed
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.paths import git, toplevel
from pytest_gpumem.prediction.process import last_words
from pytest_gpumem.quoting import MOST, printable, quoted
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import Tolerance, format_exact, format_size, parse_tolerance
from pytest_gpumem.text import counted
from pytest_gpumem.values.measurement import Measurement


class UnmeasuredError(ValueError):
    """A commit at which the test cannot be measured; the message is the reason."""


Measure = Callable[[str], "Measurement"]
"""A function that runs the test at a commit; raises :class:`UnmeasuredError`."""


@dataclass
class Search:
    """A binary search for the commit that raised a peak to its value at the last commit."""

    commits: Sequence[str]
    """The good commit, and those that followed up to the bad one."""
    measure: Measure
    tolerance: Tolerance
    report: Callable[[str, str], object] = lambda commit, text: None
    """Function called with each tried commit and its result."""
    found: dict[int, Measurement] = field(default_factory=dict)
    """Measurements by position."""
    failed: dict[int, str] = field(default_factory=dict)
    """Reasons why nothing was measured, by position."""

    @property
    def runs(self) -> int:
        """The number of attempted runs of the test."""
        return len(self.found) + len(self.failed)

    def first_bad(self) -> range:
        """Return the positions of possible causes: one, or more if some cannot be measured.

        Only position 0 means that the test did not grow. Of n commits, including the good one, at
        most log2(n) + 1 are measured, unless some cannot be. Raises :class:`UnmeasuredError` if the
        last one cannot be measured.
        """
        low, high = 0, len(self.commits) - 1
        peak = self._peak(high)
        if peak is None:
            raise UnmeasuredError(self.failed[high])
        floor = peak - self.tolerance.allowance(peak)
        skipped: set[int] = set()
        while candidates := [at for at in range(low, high) if at not in skipped]:
            middle = (low + high) // 2
            at = min(candidates, key=lambda one: abs(one - middle))
            tried = self._peak(at)
            if tried is None:
                skipped.add(at)
            elif tried >= floor:
                high = at
            else:
                low = at + 1
        return range(low, high + 1)

    def _peak(self, at: int) -> int | None:
        commit = self.commits[at]
        try:
            self.found[at] = self.measure(commit)
        except UnmeasuredError as error:
            self.failed[at] = str(error)
            self.report(commit, f"not measured: {error}")
            return None
        self.report(commit, format_size(self.found[at].peak_allocated))
        return self.found[at].peak_allocated


def run(arguments: argparse.Namespace) -> Answer:
    """Search, and return the result; raises ``ValueError`` for bad input."""
    top = toplevel(Path.cwd())
    commits = commits_between(top, arguments.good, arguments.bad)
    # One step for the last commit, and a binary search among the others.
    arguments.progress.expect(1 + (len(commits) - 1).bit_length())
    tolerance = parsed("--tolerance", parse_tolerance, arguments.tolerance)
    further = parsed("--pytest-args", shlex.split, arguments.pytest_args)

    def report(commit: str, text: str) -> None:
        out = sys.stderr if arguments.json else sys.stdout
        arguments.progress.step()
        arguments.progress.say(printable(f"{commit[:9]}  {text}"), out)

    with work_tree(top) as tree:
        where = top, tree, arguments.test, arguments.gpu, further
        search = Search(commits, lambda commit: measured_at(commit, *where), tolerance, report)
        try:
            causes = search.first_bad()
        except UnmeasuredError as error:
            raise ValueError(f"{arguments.bad} cannot be the bad one: {error}") from None
    grew = causes[-1] > 0
    return Answer(
        _lines(search, causes, top, arguments.good),
        lambda: _data(search, causes if grew else range(0)),
        failed=grew,
    )


def _commit(top: Path, revision: str) -> str:
    try:
        named = git(top, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except ValueError:
        raise ValueError(f"{quoted(revision)} is no commit of this repository") from None
    return named.decode().strip()


def commits_between(top: Path, good: str, bad: str) -> list[str]:
    """Return the commits from ``good`` to ``bad``, both included, along first parents.

    Raises ``ValueError`` with one sentence if they do not exist or ``bad`` does not follow.
    """
    first, last = (_commit(top, revision) for revision in (good, bad))
    listed = git(top, "rev-list", "--first-parent", "--reverse", f"{first}..{last}")
    following = listed.decode().split()
    if not following:
        raise ValueError(
            printable(f"{bad} does not come after {good}: no commit lies between them", MOST)
        )
    return [first, *following]


@contextmanager
def work_tree(top: Path) -> Iterator[Path]:
    """Make a work tree of the repository ``top`` for the duration of the context."""
    with tempfile.TemporaryDirectory(prefix="gpumem-bisect-") as temporary:
        tree = Path(temporary).resolve() / "tree"
        git(top, "worktree", "add", "--quiet", "--detach", "--no-checkout", str(tree), "HEAD")
        try:
            yield tree
        finally:
            git(top, "worktree", "remove", "--force", "--force", str(tree))


def measured_at(
    commit: str, top: Path, tree: Path, nodeid: str, gpu: str, arguments: Sequence[str] = ()
) -> Measurement:
    """Return the measurement of a test at ``commit``; raises :class:`UnmeasuredError`.

    It is checked out in the work tree ``tree``; ``top`` is the user's work tree, not changed.
    """
    git(tree, "checkout", "--quiet", "--force", "--detach", commit)
    git(tree, "clean", "--quiet", "-ffdx")
    inside = Path.cwd().resolve().relative_to(top.resolve())
    folder = tree / inside
    if not folder.is_dir():
        raise UnmeasuredError(f"there is no folder {inside}")
    report = tree.parent / "report.json"
    report.unlink(missing_ok=True)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", nodeid, "-p", "no:cacheprovider"),
            *(f"--gpumem-device=sim:{gpu}", "--gpumem-all", "--gpumem-report=off"),
            *(f"--gpumem-report=json:{report}", *arguments),
        ],
        cwd=folder,
        env=_environment(top.resolve(), tree),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        records = read_report(report)
    except ValueError:
        raise UnmeasuredError(printable(last_words(ran), MOST)) from None
    measured = [record for record in records if record.measurement is not None]
    if len(measured) > 1:
        names = ", ".join(record.nodeid for record in measured)
        raise ValueError(f"{nodeid} are {len(measured)} tests, give one of {names}")
    whole = [record for record in measured if record.is_whole]
    if not whole:
        raise UnmeasuredError(printable(last_words(ran), MOST))
    assert whole[0].measurement is not None
    return whole[0].measurement


def _environment(top: Path, tree: Path) -> dict[str, str]:
    """Return variables by which the work tree's code is imported instead of the user's."""
    search = [str(tree), str(tree / "src")]
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(entry).resolve()
        search.append(str(tree / path.relative_to(top)) if path.is_relative_to(top) else entry)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),
        # Files of two commits with the same second and size would share compiled code.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _lines(search: Search, causes: range, top: Path, good: str) -> Iterator[str]:
    commits = search.commits
    yield ""
    if causes[-1] == 0:
        peak, last = (format_size(search.found[at].peak_allocated) for at in (0, len(commits) - 1))
        yield f"it did not grow: {peak} at {good}, {last} at the bad one"
    elif len(causes) > 1:
        yield "one of these commits made it grow, and some of them cannot be measured:"
        for at in causes:
            yield f"  {_commit_text(top, commits[at]) if at else f'{good}, or one before it'}"
    else:
        now, before = search.found[causes[0]], search.found[causes[0] - 1]
        yield f"{_commit_text(top, commits[causes[0]])} made it grow"
        peaks = before.peak_allocated, now.peak_allocated
        yield f"  from {format_exact(peaks[0])} to {format_exact(peaks[1])}, {change_text(*peaks)}"
        yield from _explanation(before, now)
    yield f"{counted(search.runs, 'run')} among {len(commits)} commits"


def _explanation(before: Measurement, now: Measurement) -> list[str]:
    """Return the lines on differing bytes; empty if a side recorded no lines."""
    if not before.sites or not now.sites:
        return []
    changes = explain(map(Site.from_dict, now.sites), map(Site.from_dict, before.sites))
    return explanation_lines([change.to_dict() for change in changes])


def _commit_text(top: Path, commit: str) -> str:
    shown = git(top, "show", "--no-patch", "--format=%h %s (%an, %ad)", "--date=short", commit)
    return shown.decode(errors="replace").strip()


def _data(search: Search, causes: range) -> dict[str, object]:
    pair = [search.found[causes[0] + step] for step in (-1, 0)] if len(causes) == 1 else []
    return {
        "guilty": [search.commits[at] for at in causes],
        "runs": search.runs,
        "commits": len(search.commits),
        "peaks": {search.commits[at]: m.peak_allocated for at, m in sorted(search.found.items())},
        "not_measured": {search.commits[at]: why for at, why in sorted(search.failed.items())},
        "explanation": _explanation(*pair) if pair else [],
    }


COMMAND = Command(
    description="Run a test at commits between a good and a bad one, on a simulated GPU and in "
    "a work tree of its own, and say which commit made its peak grow, and by which lines. Exit "
    "code 1 where one is found, 0 where the test did not grow. A merge counts as one commit.",
    run=run,
    arguments=(
        Argument("test TEST", "node id, as for pytest"),
        Argument("--good REV", "commit at which it used less", required=True),
        Argument("--bad REV", "default: HEAD", default="HEAD"),
        Argument("--gpu MODEL", "the model to simulate", default=DEFAULT_GPU),
        Argument("--tolerance TOLERANCE", "the largest difference of equal peaks", default="0"),
        Argument("--pytest-args ARGUMENTS", 'for pytest, like "-p no:randomly"', default=""),
    ),
    examples=('gpumem bisect "tests/test_model.py::test_step" --good v1.0',),
)
