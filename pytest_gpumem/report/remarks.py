"""Remarks that need no option: on leaks, and on baselines without a test."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.baseline.collected import Unused
from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.quoting import quoted_for_shell
from pytest_gpumem.report.commands import PRUNE, Command
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import Line, TextRun, wrap


@dataclass(frozen=True)
class Missing:
    """Baselines that no test uses, and tests with baselines in other environments only."""

    unused: Sequence[Unused] = ()
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Number of tests without a baseline in their environment, by environment that has one."""
    folder: str = "baselines"
    """Folder of the baselines, relative to the folder in which pytest was started."""

    @property
    def moved(self) -> int:
        """The number of tests compared with nothing because their baselines have other names.

        Only tests with equal numbers count: a new test may have a name similar to an old one's.
        """
        return sum(one.same for one in self.unused)


def leaks(records: Sequence[TestRecord]) -> Iterator[str]:
    """Yield the sentence on memory that tests without ``max_leak`` left behind."""
    leaking = [r for r in records if _unlimited_leak(r) and r.outcome == "passed"]
    if not leaking:
        return
    largest = max(leaking, key=_unlimited_leak)
    size = format_size(_unlimited_leak(largest))
    if len(leaking) == 1:
        yield f"{largest.nodeid} left {size} behind; max_leak=0 makes that a failure"
    else:
        yield (
            f"{len(leaking)} tests left memory behind, at most {size} ({largest.nodeid}); "
            "max_leak=0 makes that a failure"
        )


def unmarked(records: Sequence[TestRecord]) -> Iterator[str]:
    """Yield the sentence on tests that are not judged because they only use the fixture."""
    found = [record for record in records if not record.expectation]
    if len(found) == 1:
        yield f"{found[0].nodeid} is not judged: it has the gpumem fixture and no gpumem marker"
    elif found:
        yield (
            f"{len(found)} tests are not judged, like {found[0].nodeid}: they have the gpumem "
            "fixture and no gpumem marker"
        )


def missing_lines(missing: Missing, command: Command, *, most: int, width: int) -> Iterator[Line]:
    """Yield the baselines that no test uses, the reason, and the commands to run."""
    yield from map(Line.of, _elsewhere(missing.elsewhere, width))
    unused = missing.unused
    if not unused:
        return
    have = "baseline has" if len(unused) == 1 else "baselines have"
    yield Line.of(f"{len(unused)} stored {have} no test any more:", "yellow")
    for one in unused[:most]:
        text = one.nodeid
        if one.successor:
            same = "that measures the same" if one.same else "that has nearly its name"
            text += f": probably {one.successor} now, {same}"
        yield from map(Line.of, wrap(text, width, first="  ", rest="      "))
    if len(unused) > most:
        yield Line.of(f"  and {len(unused) - most} more (-v lists all)", "dim")
    moves = list(dict.fromkeys(_moves(unused)))
    for old, new in moves[:most]:
        folder = (
            "" if missing.folder == "baselines" else f" --baselines {shlex.quote(missing.folder)}"
        )
        line = f"gpumem baselines move{folder} {quoted_for_shell(old)} {quoted_for_shell(new)}"
        yield Line((TextRun("  move it: "), TextRun(line, "cyan")))
    drop = "drop it" if len(unused) == 1 else "drop them all"
    yield Line((TextRun(f"  {drop}: "), TextRun(command.again(PRUNE), "cyan")))


def _elsewhere(elsewhere: Mapping[str, int], width: int) -> Iterator[str]:
    """Yield a note on tests that have a baseline only in another environment."""
    if not elsewhere:
        return
    key, count = max(elsewhere.items(), key=lambda item: item[1])
    tests = "1 test has a baseline" if count == 1 else f"{count} tests have a baseline"
    more = f" (and {len(elsewhere) - 1} more)" if len(elsewhere) > 1 else ""
    text = f"{tests} in {key}{more} and none in this environment: they were compared with nothing"
    yield from wrap(text.replace("they were", "it was") if count == 1 else text, width, rest="  ")


def _moves(unused: Sequence[Unused]) -> Iterator[tuple[str, str]]:
    """Yield old and new names of moved baselines; of the module if all its tests have moved."""
    for one in unused:
        if one.successor is None:
            continue
        module, new = split_nodeid(one.nodeid)[0], split_nodeid(one.successor)[0]
        alike = [other for other in unused if split_nodeid(other.nodeid)[0] == module]
        whole = len(alike) > 1 and all(
            other.successor == f"{new}::{split_nodeid(other.nodeid)[1]}" for other in alike
        )
        yield (module, new) if whole else (one.nodeid, one.successor)


def _unlimited_leak(record: TestRecord) -> int:
    if record.expectation.get("max_leak") is not None:
        return 0
    return max((measured.leaked or 0 for measured in record.measurements), default=0)
