"""The terminal: the section "gpumem" at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.update import UpdateReport
from pytest_gpumem.baseline.verdict import failure_statements
from pytest_gpumem.quoting import MOST, printable
from pytest_gpumem.report.commands import PLAIN, UPDATE, Command
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.remarks import Missing, missing_lines
from pytest_gpumem.report.rows import STATUSES, test_status
from pytest_gpumem.report.table import Sort, table
from pytest_gpumem.simulated.common.compiled_notes import ran_eagerly
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import Line, TextRun, counted, pack, shorten, wrap, write_lines
from pytest_gpumem.values.environment import Environment

if TYPE_CHECKING:
    from _pytest._io import TerminalWriter

MOST_LISTED = 10
"""The most tests, changes and notes of one kind that are listed unless verbose."""

OWN_CODE = ": torch's own CUDA code over a runtime without kernels"
"""Added to the torch release on a dry device."""


def describe(environment: Environment) -> str:
    """Return a description of an environment, real or not: ``simulated A100-40GB (torch 2.13)``."""
    facts = [f"torch {environment.torch}{OWN_CODE if environment.dry else ''}"]
    if not environment.is_exact:
        facts += [f"CUDA {environment.cuda}"] if environment.cuda else []
        facts += [f"driver {environment.driver}"] if environment.driver else []
    facts += filter(None, (environment.partition, environment.ranks))
    facts += [printable(environment.alloc_conf, MOST)] if environment.alloc_conf else []
    if environment.cublas_workspace_config:
        config = printable(environment.cublas_workspace_config, MOST)
        facts.append(f"CUBLAS_WORKSPACE_CONFIG={config}")
    facts += [f"{name}={printable(word, MOST)}" for name, word in environment.extra]
    return f"{environment.kind}{environment.gpu} ({', '.join(facts)})"


def write_section(writer: TerminalWriter, lines: Sequence[Line], *, verbosity: int) -> None:
    """Write the section, without a title when quiet; write nothing if there are no lines."""
    if lines and verbosity >= 0:
        writer.sep("=", "gpumem")
    write_lines(writer, lines)


def section(
    records: Sequence[TestRecord],
    *,
    verbosity: int,
    width: int,
    update: UpdateReport | None = None,
    notes: Sequence[str] = (),
    command: Command = PLAIN,
    shown_above: bool = False,
    missing: Missing | None = None,
    rows: int | None = None,
    sort: Sort | None = None,
) -> list[Line]:
    """Return the lines of the section, at most ``width`` wide, except for commands to copy.

    ``verbosity`` is pytest's: below 0 failures and one summary line, above 0 everything with
    exact bytes. ``command`` is pytest's command line, for suggested commands.
    ``shown_above``: pytest has shown the failures. ``missing``: unused baselines, and tests that
    were compared with nothing. ``rows`` and ``sort`` are arguments of :func:`table`.
    """
    if update is not None and update.has_recorded:
        # The update's own messages report numbers that could not be recorded.
        records = [replace(record, missing_baseline=False) for record in records]
    notes = [note for note in notes if update is None or note not in update.errors]
    most = len(records) + MOST_LISTED if verbosity > 0 else MOST_LISTED
    one = _Section(records, verbosity, width, most, command)
    quiet, verbose = verbosity < 0, verbosity > 0
    blocks: list[Iterable[Line]] = [] if quiet else [*one.tables(rows, sort)]
    blocks += [one.expected()] if verbose else []
    blocks += [one.failures(shown_above), *([one.compositions()] if verbose else [])]
    if quiet:
        # Errors with files decide the exit status, so they are printed even if pytest is quiet. So
        # are notes that other code than the intended one was measured.
        eager = dict.fromkeys(note for note in one.notes_of_tests() if ran_eagerly(note))
        blocks.append(one.notes([*notes, *eager], len(notes) + MOST_LISTED))
    else:
        blocks += [one.acceptable(), one.improvements(), one.without_baseline()]
        blocks += [missing_lines(missing, command, most=most, width=width)] if missing else []
        blocks += [one.notes([*notes, *one.notes_of_tests()], most), one.devices()]
    blocks += [one.updates(update), one.summary()]
    lines: list[Line] = []
    for block in filter(None, map(list, blocks)):
        lines += [Line()] if lines and verbosity >= 0 else []
        lines += block
    return lines


@dataclass(frozen=True)
class _Section:
    """The blocks of the section, each as lines."""

    records: Sequence[TestRecord]
    verbosity: int
    width: int
    most: int
    """The most tests and changes of one kind that are listed."""
    command: Command

    def tables(self, rows: int | None, sort: Sort | None) -> Iterator[list[Line]]:
        for environment, found in _by_environment(self.records).items():
            heading = self._wrapped(describe(environment), "bold")
            shown = table(found, verbosity=self.verbosity, width=self.width, rows=rows, sort=sort)
            yield [*heading, *shown]

    def expected(self) -> Iterator[Line]:
        """Compare closed forms with the bytes by category, for tests with watched objects."""
        for record in self.records:
            measured = record.measurement
            if measured is None or not measured.expected:
                continue
            yield Line.of(shorten(f"{record.nodeid}, by closed forms:", self.width))
            for category, expected in measured.expected.items():
                seen = [p.composition.get(category, 0) for p in measured.phases.values()]
                at_most = f", at most {max(seen):,} B seen" if any(seen) else ""
                yield from self._sentence(f"{category} {expected:,} B{at_most}")

    def failures(self, shown_above: bool) -> Iterator[Line]:
        verbose = self.verbosity > 0
        for record in self.records:
            if not shown_above if record.failed else record.broken and verbose:
                yield self._marked(test_status(record), record.nodeid)
                statements = [one.verdict for one in failure_statements(record.broken)]
                shown = record.broken if verbose else statements
                causes = dict.fromkeys(verdict.cause for verdict in shown if verdict.cause)
                for text in (*causes, *(verdict.short for verdict in shown)):
                    yield from self._sentence(text)

    def compositions(self) -> Iterator[Line]:
        """Yield the holders of bytes at each test's peak, with source lines where very verbose."""
        composed = [(one, one.measurement) for one in self.records]
        found = [(one, measured) for one, measured in composed if measured and measured.sites]
        if found:
            yield Line.of("what held the bytes at the peak", "bold")
        for record, measured in found:
            yield Line.of(f"  {shorten(record.nodeid, self.width - 2)}")
            held = sorted(measured.composition.items(), key=lambda item: -item[1])
            parts = [f"{category} {format_size(nbytes)}" for category, nbytes in held]
            for line in pack(parts, self.width, first="    ", rest="    "):
                yield Line.of(line, "dim")
            if self.verbosity > 1:
                every, width = self.verbosity > 2, self.width - 2
                sites = explanation_lines(measured.sites, signed=False, every=every, width=width)
                yield from (Line.of(f"  {line}", "dim") for line in sites)

    def acceptable(self) -> Iterator[Line]:
        """Yield the command that accepts the numbers of several tests beyond their baselines."""
        failed = [record for record in self.records if record.failed]
        over = [one for one in failed if all(v.kind == "baseline" for v in one.broken)]
        if len(over) > 1:
            failed_last = ["--lf"] * self.command.cached
            line = self.command.again(*failed_last, UPDATE)
            yield Line((TextRun(f"accept all {len(over)}: "), TextRun(line, "cyan")))

    def improvements(self) -> Iterator[Line]:
        improved = [record for record in self.records if test_status(record) == "better"]
        for record in improved[: self.most]:
            yield self._marked("better", record.nodeid)
            for improvement in record.improvements:
                yield from self._sentence(improvement.short)
        yield from _rest(improved, self.most, "improved")
        if improved:
            shown = [record.nodeid for record in improved[: self.most]]
            why = "lock it in" if len(shown) == 1 else "lock them in"
            yield _command(why, self.command.records(*shown))

    def without_baseline(self) -> Iterator[Line]:
        missing = [record for record in self.records if test_status(record) == "new"]
        for environment, found in _by_environment(missing).items():
            tests = counted(len(found), "test")
            yield from self._wrapped(f"no baseline in {environment.key} for {tests}:", "yellow")
            for record in found[: self.most]:
                yield Line.of(shorten(f"  {record.nodeid}", self.width))
            yield from _rest(found, self.most, "without baseline")
        if missing:
            yield _command("record them", self.command.again(f"{UPDATE}=new"))

    def updates(self, update: UpdateReport | None) -> Iterator[Line]:
        if update is None:
            return
        kinds = (("+", "added", update.added), ("~", "changed", update.changed))
        pruned = ("-", "pruned", update.pruned)
        counts = {
            **{word: len(changes) for _, word, changes in kinds},
            "unchanged": update.unchanged,
            "pruned": len(update.pruned),
        }
        listed = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        files = f" ({counted(len(update.written), 'file')} written)" if update.written else ""
        otherwise = "nothing recorded" if update.errors else "nothing to record"
        errors = len(update.errors)
        fails = f"; {counted(errors, 'error')}, so the exit status is not 0" if errors else ""
        yield from self._wrapped(f"baselines: {listed or otherwise}{files}{fails}")
        if self.verbosity >= 0:
            all_of_them = counts["added"] + counts["changed"] if self.verbosity else 0
            most = max(all_of_them, MOST_LISTED)
            for mark, word, changes in (*kinds, pruned):
                for change in changes[:most]:
                    text = wrap(change.text, self.width, first=f"  {mark} ", rest="      ")
                    yield from map(Line.of, text)
                yield from _rest(changes, most, word)
            for message in update.messages:
                yield from self._sentence(message)
        for error in update.errors:
            yield from self._sentence(error, "red")

    def notes(self, notes: Sequence[str], most: int) -> Iterator[Line]:
        counts = Counter(notes)
        for note, count in sorted(counts.items(), key=lambda item: not ran_eagerly(item[0]))[:most]:
            times = f" ({counted(count, 'test')})" if count > 1 else ""
            yield from self._wrapped(f"note: {note}{times}")
        yield from _rest(counts, most, "notes", tests=False)

    def notes_of_tests(self) -> Iterator[str]:
        """Yield the notes on each test, once for each."""
        for record in self.records:
            yield from dict.fromkeys(note for one in record.measurements for note in one.notes)

    def devices(self) -> Iterator[Line]:
        for environment, found in _by_environment(self.records).items():
            if environment.dry and self.verbosity <= 0:
                continue  # no other process uses a dry device
            readings = [record.nvml for record in found if record.nvml is not None]
            read = [reading for reading in readings if "absent" not in reading]
            if read:
                fullest = max(read, key=lambda reading: int(reading["used"]))
                yield from self._wrapped(_device_text(fullest), "dim")
            elif readings and self.verbosity > 0:
                text = f"whole device: not read, because {readings[0]['absent']}"
                yield from self._wrapped(text, "dim")

    def summary(self) -> Iterator[Line]:
        records = self.records
        if not records:
            return
        counts = Counter(map(test_status, records))
        short = [one.missing for one in records if test_status(one) == "OOM"]
        lacked = f" ({format_size(max(short))} too much)" if any(short) else ""
        words = {status: word for status, (_, word) in STATUSES.items()}
        words["OOM"] += lacked
        states = ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key])
        # The line names the devices, so that a simulated number is not taken for a measured one.
        gpus: dict[str, dict[str, None]] = {"": {}, "dry ": {}, "simulated ": {}}
        for environment in (record.environment for record in records):
            gpus[environment.kind][environment.gpu] = None
        named = (f"{kind}{', '.join(names)}" for kind, names in gpus.items() if names)
        text = f"gpumem: {counted(len(records), 'test')} on {' and '.join(named)}: {states}"
        if measured := [record for record in records if record.measurement is not None]:
            largest = max(measured, key=lambda record: record.peak)
            name = shorten(largest.nodeid, self.width - 4)
            text += f"; highest peak {format_size(largest.peak)} ({name})"
        style = "bold red" if counts["FAIL"] or counts["OOM"] else "bold green"
        yield from self._wrapped(text, style)

    def _wrapped(self, text: str, style: str = "") -> Iterator[Line]:
        return (Line.of(line, style) for line in wrap(text, self.width, rest="  "))

    def _sentence(self, text: str, style: str = "") -> Iterator[Line]:
        lines = wrap(text, self.width, first="  ", rest="    ")
        return (Line.of(line, style) for line in lines)

    def _marked(self, status: str, nodeid: str) -> Line:
        name = shorten(nodeid, self.width - len(status) - 1)
        return Line((TextRun(status, STATUSES[status][0]), TextRun(f" {name}", "bold")))


def _by_environment(records: Sequence[TestRecord]) -> dict[Environment, list[TestRecord]]:
    environments: dict[Environment, list[TestRecord]] = defaultdict(list)
    for record in records:
        environments[record.environment].append(record)
    return environments


def _device_text(reading: Mapping[str, Any]) -> str:
    """Return the text on NVML's readings, separate from the allocator's numbers."""
    used, total = format_size(reading["used"]), format_size(reading["total"])
    text = f"whole device (NVML): at most {used} of {total} used"
    if reading["process_used"] is not None:
        text += f", by this process {format_size(reading['process_used'])}"
    elif reading["unattributed"]:
        text += f", by this process unattributed ({reading['unattributed']})"
    others = [
        f"{other['name'] or 'PID'} {other['pid']}"
        + (f" ({format_size(other['used'])})" if other["used"] is not None else "")
        for other in reading["others"] or ()
    ]
    return f"{text}; other processes: {', '.join(others)}" if others else text


def _command(why: str, command: str) -> Line:
    # Not wrapped or shortened, so that it can be copied.
    return Line((TextRun(f"  {why}: "), TextRun(command, "cyan")))


def _rest(found: Collection[object], most: int, word: str, *, tests: bool = True) -> Iterator[Line]:
    if (hidden := len(found) - most) > 0:
        count = counted(hidden, "test") if tests else str(hidden)
        yield Line.of(f"  and {count} more {word} (-v lists all)", "dim")
