"""GitHub Actions: annotations on the lines of tests, and the summary of the step.

The form of a workflow command and its escaping are those of actions/toolkit,
``packages/core/src/command.ts``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_gpumem.baseline.verdict import main_verdict
from pytest_gpumem.paths import git, toplevel
from pytest_gpumem.quoting import MOST, printable, shortened
from pytest_gpumem.report.markdown import MOST_NAME, document, failure_lines, is_failure
from pytest_gpumem.report.record import ReportedRun, TestRecord

MOST_ANNOTATIONS = 10
"""The number of errors, and of notices, of a step that GitHub shows."""

_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_DATA, ord(":"): "%3A", ord(","): "%2C"}


def workflow_commands(run: ReportedRun) -> list[str]:
    """Return workflow commands that mark failures as errors and improvements as notices."""
    failed = [record for record in run.records if is_failure(record)]
    changed = changed_lines(run.root) if failed else None
    better = [record for record in run.records if record.improvements and not is_failure(record)]
    notices = []
    for record in better:
        text = "\n".join(printable(improvement.short) for improvement in record.improvements)
        notices.append((text, _place("less GPU memory", record, run)))
    errors = [_failure(record, run, changed) for record in failed]
    return [*_limited("error", errors), *_limited("notice", notices)]


def workflow_command(name: str, message: str, **properties: str | int) -> str:
    """Return one workflow command; its parts are escaped so that they cannot contain another."""
    given = ",".join(f"{key}={str(one).translate(_PROPERTY)}" for key, one in properties.items())
    return f"::{name} {given}::{message.translate(_DATA)}"


def write_summary(run: ReportedRun) -> None:
    """Append the Markdown of the run to the summary of the step, where there is one.

    Raises ``ValueError`` where it cannot be written.
    """
    path = os.getenv("GITHUB_STEP_SUMMARY")
    if not path:
        return
    text = document(run.records, command=run.command, skipped=run.skipped)
    try:
        with Path(path).open("a", encoding="utf-8") as summary:
            summary.write(f"{text}\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"GITHUB_STEP_SUMMARY {printable(path, MOST)} cannot be written: {reason}; give "
            "--gpumem-report off where no report of GitHub's is wanted"
        ) from error


def _limited(name: str, found: list[tuple[str, dict[str, str | int]]]) -> Iterator[str]:
    shown = found if len(found) <= MOST_ANNOTATIONS else found[: MOST_ANNOTATIONS - 1]
    for message, properties in shown:
        yield workflow_command(name, message, **properties)
    if hidden := len(found) - len(shown):
        yield workflow_command(
            name, f"{hidden} tests more: see the summary of this step", title="GPU memory"
        )


def _failure(
    record: TestRecord, run: ReportedRun, changed: Changed | None
) -> tuple[str, dict[str, str | int]]:
    lines = map(printable, failure_lines(record, run.command))
    grown = _grown_line(record, run, changed)
    place = _place("GPU memory", record, run)
    if grown is None:
        return "\n".join(lines), place
    name = printable(shortened(record.nodeid, MOST_NAME))
    return "\n".join([name, *lines]), {**place, **grown}


def _grown_line(
    record: TestRecord, run: ReportedRun, changed: Changed | None
) -> dict[str, str | int] | None:
    """Return the line that grew most among those changed by the pull request, if there is one."""
    if not record.broken or changed is None:
        return None
    top, lines = changed
    for change in main_verdict(record.broken).explanation:
        path, _, line = (change.get("site") or "").rpartition(":")
        if change["bytes"] <= 0 or not path or not line.isdecimal():
            continue
        file = Path(os.path.normpath(run.root / path))
        known = file.relative_to(top).as_posix() if file.is_relative_to(top) else ""
        if int(line) in lines.get(known, ()):
            return {"file": printable(_in_repository(file)), "line": int(line)}
    return None


def _place(title: str, record: TestRecord, run: ReportedRun) -> dict[str, str | int]:
    titled: dict[str, str | int] = {
        "title": f"{title}: {printable(shortened(record.nodeid, MOST_NAME))}"
    }
    if record.nodeid not in run.lines:
        return titled
    file, line = run.lines[record.nodeid]
    return {"file": printable(_in_repository(run.root / file)), "line": line, **titled}


def _in_repository(path: Path) -> str:
    """Return ``path`` relative to GitHub's checkout."""
    path = Path(os.path.normpath(path))
    workspace = os.getenv("GITHUB_WORKSPACE")
    if workspace and path.is_relative_to(workspace):
        return path.relative_to(workspace).as_posix()
    return path.as_posix()


_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")

Lines = Mapping[str, set[int]]
"""Line numbers by path, relative to the top of the repository."""
Changed = tuple[Path, Lines]
"""The top of the repository, and its changed lines."""


def changed_lines(root: Path) -> Changed | None:
    """Return the top of the repository of ``root``, and the lines that differ from the base branch.

    ``None`` outside of a pull request on GitHub, and without the base branch, as in a checkout of
    depth 1.
    """
    base = os.getenv("GITHUB_BASE_REF")
    if not base:
        return None
    try:
        top = toplevel(root)
        # From the merge base: later commits of the base branch are no changes of this branch.
        diff = git(root, "diff", "--unified=0", "--no-color", f"origin/{base}...HEAD")
    except ValueError:
        return None
    changed: defaultdict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.decode(errors="replace").splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := _HUNK.match(line):
            begin, count = int(hunk[1]), int(hunk[2] or 1)
            changed[path].update(range(begin, begin + count))
    return top, changed
