"""The terminal: the section "gpumem" at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.failure import failure_statements
from pytest_gpumem.echo import MOST, printable
from pytest_gpumem.report.causes import missing as missing_bytes
from pytest_gpumem.report.commands import PLAIN, UPDATE, Command
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.remarks import Missing, missing_lines
from pytest_gpumem.report.rows import STATUS_STYLE, test_status
from pytest_gpumem.report.selection import Sort
from pytest_gpumem.report.table import table
from pytest_gpumem.simulated.common.compiled_notes import ran_eagerly
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import Line, Span, Writer, pack, shorten, wrap, write_lines
from pytest_gpumem.values.environment import Environment

if TYPE_CHECKING:
    from pytest_gpumem.baseline.update import Change, UpdateReport

MOST_LISTED = 10
"""Tests, changes and notes of one kind that are listed unless verbose."""

STATUS_WORDS = {
    "ok": "ok",
    "FAIL": "failed",
    "OOM": "out of memory",
    "xfail": "failed as expected",
    "better": "improved",
    "new": "without baseline",
    "-": "not judged",
}


OWN_CODE = ": torch's own CUDA code over a runtime without kernels"
"""A note on the release on a dry device."""


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


def write_section(writer: Writer, lines: Sequence[Line], *, verbosity: int) -> None:
    """Write the section; without a title when quiet, nothing at all when there is nothing."""
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
    told_above: bool = False,
    missing: Missing | None = None,
    rows: int | None = None,
    sort: Sort | None = None,
) -> list[Line]:
    """Return the lines of the section, none wider than ``width`` unless it is meant to be copied.

    ``verbosity`` is pytest's: below 0 failures and one summary line, above 0 everything with
    exact bytes. ``command`` is pytest's command line, for suggested commands.
    ``told_above``: pytest has shown the failures. ``missing`` lists tests compared with nothing;
    ``rows`` and ``sort`` are those of the table.
    """
    records = _recorded(records, update)
    blocks: list[list[Line]] = []
    if verbosity >= 0:
        blocks += _tables(records, verbosity, width, rows, sort)
    if verbosity > 0:
        blocks.append(list(_expected(records, width)))
    blocks.append(list(_failures(records, verbosity, width, told_above)))
    if verbosity > 0:
        blocks.append(list(_compositions(records, verbosity, width)))
    if verbosity >= 0:
        most = len(records) + MOST_LISTED if verbosity > 0 else MOST_LISTED
        blocks.append(list(_acceptable(records, command)))
        blocks.append(list(_improvements(records, most, width, command)))
        blocks.append(list(_without_baseline(records, most, width, command)))
        if missing:
            blocks.append(list(missing_lines(missing, command, most=most, width=width)))
        blocks.append(list(_notes(records, notes, most, width)))
        blocks.append(list(_devices(records, verbosity, width)))
    else:
        # Errors with files decide the exit status and are printed however quiet pytest is. So are
        # notes on numbers that are not those of the intended code.
        eager = dict.fromkeys(note for note in _of_tests(records) if ran_eagerly(note))
        blocks.append(list(_notes((), [*notes, *eager], len(notes) + MOST_LISTED, width)))
    blocks.append(list(_updates(update, verbosity, width)))
    blocks.append(list(_summary(records, width)))
    lines: list[Line] = []
    for block in filter(None, blocks):
        lines += [Line()] if lines and verbosity >= 0 else []
        lines += block
    return lines


def _recorded(records: Sequence[TestRecord], update: UpdateReport | None) -> Sequence[TestRecord]:
    """Drop the note on missing baselines where baselines have just been recorded.

    The update's own messages report numbers that could not be recorded.
    """
    if update is None or not (update.added or update.changed or update.unchanged):
        return records
    return [replace(record, missing_baseline=False) for record in records]


def _tables(
    records: Sequence[TestRecord], verbosity: int, width: int, rows: int | None, sort: Sort | None
) -> Iterator[list[Line]]:
    for environment, found in _by_environment(records).items():
        heading = [Line.of(line, "bold") for line in wrap(describe(environment), width, rest="  ")]
        yield heading + table(found, verbosity=verbosity, width=width, rows=rows, sort=sort)


def _by_environment(records: Sequence[TestRecord]) -> dict[Environment, list[TestRecord]]:
    environments: dict[Environment, list[TestRecord]] = defaultdict(list)
    for record in records:
        environments[record.environment].append(record)
    return environments


def _expected(records: Sequence[TestRecord], width: int) -> Iterator[Line]:
    """Compare closed forms with the bytes by category, for tests with watched objects."""
    for record in records:
        measured = record.measurement
        if measured is None or not measured.expected:
            continue
        yield Line.of(shorten(f"{record.nodeid}, by closed forms:", width))
        for category, expected in measured.expected.items():
            seen = [p.composition.get(category, 0) for p in measured.phases.values()]
            at_most = f", at most {max(seen):,} B seen" if any(seen) else ""
            yield from _sentence(f"{category} {expected:,} B{at_most}", width)


def _acceptable(records: Sequence[TestRecord], command: Command) -> Iterator[Line]:
    """Yield the command that accepts the numbers of several tests beyond their baselines."""
    over = [r for r in records if r.failed and all(v.kind == "baseline" for v in r.broken)]
    if len(over) > 1:
        yield Line((Span(f"accept all {len(over)}: "), Span(command.records_failures(), "cyan")))


def _failures(
    records: Sequence[TestRecord], verbosity: int, width: int, told_above: bool
) -> Iterator[Line]:
    for record in records:
        if not told_above if record.failed else record.broken and verbosity > 0:
            yield _marked(test_status(record), record.nodeid, width)
            shown = (
                record.broken
                if verbosity > 0
                else [one.verdict for one in failure_statements(record.broken)]
            )
            for cause in dict.fromkeys(verdict.cause for verdict in shown if verdict.cause):
                yield from _sentence(cause, width)
            for verdict in shown:
                yield from _sentence(verdict.short, width)


def _compositions(records: Sequence[TestRecord], verbosity: int, width: int) -> Iterator[Line]:
    """Yield the holders of bytes at each test's peak, with source lines where very verbose."""
    composed = [record for record in records if record.measurement and record.measurement.sites]
    if composed:
        yield Line.of("what held the bytes at the peak", "bold")
    for record in composed:
        assert record.measurement is not None
        yield Line.of(f"  {shorten(record.nodeid, width - 2)}")
        held = sorted(record.measurement.composition.items(), key=lambda item: -item[1])
        parts = [f"{category} {format_size(nbytes)}" for category, nbytes in held]
        for line in pack(parts, width, first="    ", rest="    "):
            yield Line.of(line, "dim")
        if verbosity > 1:
            sites = explanation_lines(
                record.measurement.sites, signed=False, every=verbosity > 2, width=width - 2
            )
            yield from (Line.of(f"  {line}", "dim") for line in sites)


def _improvements(
    records: Sequence[TestRecord], most: int, width: int, command: Command
) -> Iterator[Line]:
    improved = [record for record in records if test_status(record) == "better"]
    for record in improved[:most]:
        yield _marked("better", record.nodeid, width)
        for improvement in record.improvements:
            yield from _sentence(improvement.short, width)
    yield from _rest(improved, most, "improved")
    if improved:
        shown = [record.nodeid for record in improved[:most]]
        yield _command("lock it in" if len(shown) == 1 else "lock them in", command.records(*shown))


def _without_baseline(
    records: Sequence[TestRecord],
    most: int,
    width: int,
    command: Command,
) -> Iterator[Line]:
    missing = [record for record in records if test_status(record) == "new"]
    for environment, found in _by_environment(missing).items():
        text = f"no baseline in {environment.key} for {_tests(len(found))}:"
        yield from (Line.of(line, "yellow") for line in wrap(text, width, rest="  "))
        yield from (Line.of(shorten(f"  {record.nodeid}", width)) for record in found[:most])
        yield from _rest(found, most, "without baseline")
    if missing:
        yield _command("record them", command.again(f"{UPDATE}=new"))


def _updates(update: UpdateReport | None, verbosity: int, width: int) -> Iterator[Line]:
    if update is None:
        return
    counts = {
        "added": len(update.added),
        "changed": len(update.changed),
        "unchanged": update.unchanged,
        "pruned": len(update.pruned),
    }
    listed = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    files = f" ({len(update.written)} file{'s' * (len(update.written) != 1)} written)"
    yield Line.of(f"baselines: {listed or 'nothing to record'}{files if update.written else ''}")
    if verbosity >= 0:
        most = MOST_LISTED if verbosity == 0 else len(update.added) + len(update.changed)
        for mark, changes in (("+", update.added), ("~", update.changed), ("-", update.pruned)):
            yield from _changes(mark, changes, max(most, MOST_LISTED), width)
        for message in update.messages:
            yield from _sentence(message, width)
    for error in update.errors:
        yield from (Line.of(line, "red") for line in wrap(error, width, first="  ", rest="    "))


def _changes(mark: str, changes: Sequence[Change], most: int, width: int) -> Iterator[Line]:
    for change in changes[:most]:
        yield from map(Line.of, wrap(change.text, width, first=f"  {mark} ", rest="      "))
    yield from _rest(changes, most, {"+": "added", "~": "changed", "-": "pruned"}[mark])


def _notes(
    records: Sequence[TestRecord], notes: Sequence[str], most: int, width: int
) -> Iterator[Line]:
    counts: Counter[str] = Counter(notes)
    counts.update(_of_tests(records))
    for note, count in sorted(counts.items(), key=lambda item: not ran_eagerly(item[0]))[:most]:
        times = f" ({_tests(count)})" if count > 1 else ""
        yield from map(Line.of, wrap(f"note: {note}{times}", width, rest="  "))
    yield from _rest(list(counts), most, "notes", tests=False)


def _of_tests(records: Sequence[TestRecord]) -> Iterator[str]:
    """Yield the notes on each test, once for each."""
    for record in records:
        yield from dict.fromkeys(note for one in record.measurements for note in one.notes)


def _devices(records: Sequence[TestRecord], verbosity: int, width: int) -> Iterator[Line]:
    for found in _by_environment(records).values():
        readings = [record.nvml for record in found if record.nvml is not None]
        read = [reading for reading in readings if "absent" not in reading]
        if read:
            text = _device_text(max(read, key=lambda reading: int(reading["used"])))
        elif readings and verbosity > 0:
            text = f"whole device: not read, because {readings[0]['absent']}"
        else:
            continue
        yield from (Line.of(line, "dim") for line in wrap(text, width, rest="  "))


def _device_text(reading: Mapping[str, Any]) -> str:
    """Return NVML's readings, kept apart from the allocator's numbers."""
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


def _summary(records: Sequence[TestRecord], width: int) -> Iterator[Line]:
    measured = [record for record in records if record.measurement is not None]
    if not records:
        return
    counts = Counter(map(test_status, records))
    lacked = max((missing_bytes(one) for one in records if test_status(one) == "OOM"), default=0)
    shortage = f" ({format_size(lacked)} too much)" if lacked else ""
    words = {**STATUS_WORDS, "OOM": f"{STATUS_WORDS['OOM']}{shortage}"}
    states = ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key])
    text = f"gpumem: {_tests(len(records))} on {_kinds(records)}: {states}"
    if measured:
        largest = max(measured, key=lambda record: record.peak)
        peak = format_size(largest.peak)
        text += f"; highest peak {peak} ({shorten(largest.nodeid, width - 4)})"
    style = "bold red" if counts["FAIL"] or counts["OOM"] else "bold green"
    yield from (Line.of(line, style) for line in wrap(text, width, rest="  "))


def _kinds(records: Sequence[TestRecord]) -> str:
    """Name the devices, so that a simulated number is never read as a measured one."""
    gpus: dict[str, dict[str, None]] = {"": {}, "dry ": {}, "simulated ": {}}
    for environment in (record.environment for record in records):
        gpus[environment.kind][environment.gpu] = None
    return " and ".join(f"{kind}{', '.join(names)}" for kind, names in gpus.items() if names)


def _tests(count: int) -> str:
    return f"{count} test" if count == 1 else f"{count} tests"


def _marked(status: str, nodeid: str, width: int) -> Line:
    name = shorten(nodeid, width - len(status) - 1)
    return Line((Span(status, STATUS_STYLE[status]), Span(f" {name}", "bold")))


def _sentence(text: str, width: int, indent: str = "  ") -> Iterator[Line]:
    yield from map(Line.of, wrap(text, width, first=indent, rest=indent + "  "))


def _command(why: str, command: str) -> Line:
    # Never broken or shortened: it is meant to be copied.
    return Line((Span(f"  {why}: "), Span(command, "cyan")))


def _rest(found: Sequence[object], most: int, word: str, *, tests: bool = True) -> Iterator[Line]:
    if hidden := len(found[most:]):
        yield Line.of(
            f"  and {_tests(hidden) if tests else hidden} more {word} (-v lists all)", "dim"
        )
