"""The update of baselines at the end of a session.

It runs once, in the process that has all results: under pytest-xdist the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_gpumem.baseline.collected import Collected, MeasuredTest
from pytest_gpumem.baseline.compare import UpdateMode
from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.garbage import paused
from pytest_gpumem.sizes import format_exact, format_size
from pytest_gpumem.text import counted
from pytest_gpumem.values.environment import Environment


@dataclass(frozen=True)
class Change:
    """An entry that was added (no ``old``), changed, or pruned (no ``new``)."""

    nodeid: str
    environment: Environment
    old: BaselineEntry | None
    new: BaselineEntry | None

    @property
    def text(self) -> str:
        """A line with the test, its changed numbers and the environment."""
        if self.old is None or self.new is None:
            entry = self.new or self.old
            sizes = format_exact(entry.peak_allocated) if entry else ""
        else:
            sizes = "; ".join(_differences(self.old, self.new))
        return f"{self.nodeid}: {sizes} [{self.environment.key}]"


@dataclass(frozen=True)
class UpdateReport:
    """The result of an update. ``errors`` fail the run; every message is one sentence."""

    written: tuple[Path, ...] = ()
    """Files that were written, or removed because no entry was left in them."""
    added: tuple[Change, ...] = ()
    changed: tuple[Change, ...] = ()
    pruned: tuple[Change, ...] = ()
    unchanged: int = 0
    """Number of tests whose stored entry equals the measured one, or was kept by mode ``new``."""
    messages: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def has_recorded(self) -> bool:
        """Whether tests have a baseline now; ``messages`` are on those that have none."""
        return bool(self.added or self.changed or self.unchanged)


def update_baselines(
    store: BaselineStore,
    tests: Sequence[MeasuredTest],
    *,
    mode: UpdateMode | None,
    prune: bool = False,
    collected: Collected | None = None,
) -> UpdateReport:
    """Write the numbers of ``tests``, delete entries without a test; return the result.

    Mode ``all`` adds and changes entries, ``new`` only adds, ``None`` does neither. Only tests that
    passed at the first attempt, without a failed subtest, count; entries of tests that did not run
    stay. Files without changes are not written. A file that cannot be read or written is left
    unchanged and gives an error; the other files are still written.

    ``prune`` deletes entries whose tests are gone by ``collected``, in the environments of
    ``tests``: in another environment, other parameters may exist. Doubtful entries stay, and a
    message reports them.
    """
    messages: dict[str, None] = {}
    plans: dict[tuple[str, str], _Plan] = {}

    def plan(environment: Environment, module: str) -> _Plan:
        return plans.setdefault((environment.key, module), _Plan(environment, module, mode))

    with paused():
        if mode is not None:
            for test, entry in _eligible(tests, messages):
                module, test_id = split_nodeid(test.nodeid)
                plan(test.environment, module).measured.append((test_id, entry))
        if prune and collected is not None:
            ran = frozenset(split_nodeid(test.nodeid) for test in tests)
            collected = replace(collected, ran=ran)
            for environment in {test.environment.key: test.environment for test in tests}.values():
                for module in store.modules(environment):
                    plan(environment, module).collected = collected
        return _write_changes(store, plans.values(), messages)


@dataclass
class _Plan:
    """The planned changes of one file."""

    environment: Environment
    module: str
    mode: UpdateMode | None
    measured: list[tuple[str, BaselineEntry]] = field(default_factory=list)
    collected: Collected | None = None
    """The existing tests, if others are pruned."""
    changes: list[Change] = field(default_factory=list)
    unchanged: int = 0
    doubted: Mapping[str, int] = field(default_factory=dict)
    """The number of stored tests that stay although they were not collected, by reason."""

    def apply(self, entries: MutableMapping[str, BaselineEntry]) -> None:
        """Change the entries, and record the changes; called again if the file is read again."""
        self.changes, self.unchanged, self.doubted = [], 0, {}
        for test_id, new in self.measured:
            old = entries.get(test_id)
            if old is not None and (self.mode == "new" or old.without_lines == new.without_lines):
                self.unchanged += 1
                continue
            entries[test_id] = new
            self._note(test_id, old, new)
        if self.collected is not None:
            unused, self.doubted = self.collected.gone(self.module, entries)
            for test_id in unused:
                self._note(test_id, entries.pop(test_id), None)

    def _note(self, test_id: str, old: BaselineEntry | None, new: BaselineEntry | None) -> None:
        self.changes.append(Change(f"{self.module}::{test_id}", self.environment, old, new))


def _eligible(
    tests: Iterable[MeasuredTest], messages: dict[str, None]
) -> Iterable[tuple[MeasuredTest, BaselineEntry]]:
    """Return the tests whose numbers may be stored, each once; add ``messages`` on the others."""
    kept: dict[tuple[str, str, str], tuple[MeasuredTest, BaselineEntry]] = {}
    disputed = {}
    wanted = [test for test in tests if test.wanted]
    for test in wanted:
        if not test.passed:
            continue
        if test.rerun or test.subtest_failed:
            reason = "passed only when run again" if test.rerun else "a subtest failed"
            messages[f"{test.nodeid} not recorded: {reason}"] = None
            continue
        key = (test.environment.key, *split_nodeid(test.nodeid))
        entry = BaselineEntry.of(test.measurement, test.tolerance)
        _, first = kept.setdefault(key, (test, entry))
        if first is not entry and first.without_lines != entry.without_lines:
            disputed[key] = test
    if failed := sum(not test.passed for test in wanted):
        messages[f"{counted(failed, 'test')} not recorded: did not pass"] = None
    for key, test in disputed.items():
        del kept[key]
        messages[f"{test.nodeid} not recorded: ran twice, with different numbers"] = None
    return kept.values()


def _write_changes(
    store: BaselineStore, plans: Iterable[_Plan], messages: dict[str, None]
) -> UpdateReport:
    """Write every changed file; return the changes in those that could be written."""
    written: list[Path] = []
    errors: dict[str, None] = {}
    done: list[_Plan] = []
    doubts: Counter[str] = Counter()
    for plan in plans:
        try:
            path = store.edit(plan.environment, plan.module, plan.apply)
        except BaselineError as error:
            of_module = f" of {plan.module}" if plan.module else ""
            lost = f"{counted(len(plan.measured), 'test')}{of_module} not recorded: "
            errors[f"{lost if plan.measured else ''}{error}"] = None
            continue
        written += [path] if path else []
        done.append(plan)
        doubts.update(plan.doubted)
    for doubt, count in doubts.items():
        messages[f"{counted(count, 'stored test')} not pruned: {doubt}"] = None
    changes = sorted(
        (change for plan in done for change in plan.changes),
        key=lambda change: (change.environment.key, change.nodeid),
    )
    return UpdateReport(
        written=tuple(sorted(written)),
        added=tuple(change for change in changes if change.old is None),
        changed=tuple(change for change in changes if change.old and change.new),
        pruned=tuple(change for change in changes if change.new is None),
        unchanged=sum(plan.unchanged for plan in done),
        messages=tuple(messages),
        errors=tuple(errors),
    )


def _differences(old: BaselineEntry, new: BaselineEntry) -> Iterator[str]:
    yield from _difference("peak", old.peak_allocated, new.peak_allocated)
    for phase in sorted(old.phases.keys() | new.phases.keys()):
        yield from _difference(phase, old.phases.get(phase), new.phases.get(phase))
    yield from _difference("reserved", old.peak_reserved, new.peak_reserved)
    yield from _difference("allocated after", old.allocated_after, new.allocated_after)
    yield from _difference("cuBLAS workspace", old.cublas_workspace, new.cublas_workspace)
    if (old.peak, old.phase_peaks) != (new.peak, new.phase_peaks):
        yield "what holds the bytes"


def _difference(name: str, old: int | None, new: int | None) -> Iterator[str]:
    if old == new:
        return
    if old is None or new is None:
        known, state = (new, "new") if old is None else (old, "gone")
        yield f"{name} {format_size(known or 0)} ({state})"
        return
    # Sizes that round to the same text are given in bytes.
    alike = format_size(old) == format_size(new)
    before, after = (f"{n:,} B" if alike else format_size(n) for n in (old, new))
    percent = f" ({format_percent(new - old, old)})" if old > 0 else ""
    yield f"{name} {before} -> {after}{percent}"
