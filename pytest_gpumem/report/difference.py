"""The changes between two runs, as a part of a pull request's comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import explain
from pytest_gpumem.baseline.collected import successors
from pytest_gpumem.baseline.compare import default_tolerance_for
from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import change_text
from pytest_gpumem.report.markdown import (
    MOST_EXPLAINED,
    MOST_ROWS,
    code,
    code_block,
    explained,
    table,
)
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import Tolerance, format_size, parse_tolerance
from pytest_gpumem.values.measurement import Measurement

Key = tuple[str, str, str]
"""Environment, module and test."""


@dataclass(frozen=True)
class Difference:
    """A test that differs; ``None`` on the side where it was not measured."""

    nodeid: str
    before: Measurement | None
    now: Measurement | None
    failed: bool = False
    """Whether it ran in the new run, and its body failed."""
    was: str = ""
    """Its former node id, where that was another."""

    @property
    def bytes(self) -> int:
        """The growth of its peak in bytes."""
        before, now = (m.peak_allocated if m else 0 for m in (self.before, self.now))
        return now - before

    @property
    def kind(self) -> str:
        """The kind of change, of :data:`KINDS`."""
        if self.failed:
            return "failed"
        if self.before is None or self.now is None:
            return "new" if self.before is None else "gone"
        return "grew" if self.bytes > 0 else "fell"


KINDS = ("grew", "fell", "new", "gone", "failed")
"""Kinds in the order of output; a test that failed has no peak to compare."""


def differences(
    before: Sequence[TestRecord], now: Sequence[TestRecord], tolerance: Tolerance | None = None
) -> list[Difference]:
    """Return the tests whose peak differs by more than ``tolerance``, the largest growth first.

    Tests are compared within one environment; without a ``tolerance``, that of the test applies, as
    it is now or else as it was, and where it states none, that of the environment. A test whose
    body failed counts as not measured. Tests of environments missing from the other run are left
    out.
    """
    old, new = _measured(before), _measured(now)
    common = {key[0] for key in old} & {key[0] for key in new}
    ran = set(map(_key, now))
    own = _tolerances(before) | _tolerances(now)
    earlier = _renamed(
        {key: old[key] for key in old.keys() - new.keys() - ran},
        {key: new[key] for key in new.keys() - old.keys()},
    )
    found = []
    for key in sorted((old.keys() | new.keys()) - set(earlier.values())):
        if key[0] not in common:
            continue
        failed = key not in new and key in ran
        past = earlier.get(key, key)
        was = _nodeid(past) if past != key else ""
        difference = Difference(_nodeid(key), old.get(past), new.get(key), failed, was)
        known = difference.now or difference.before
        default = default_tolerance_for(known is not None and (known.simulated or known.dry))
        allowed = tolerance or own.get(key) or own.get(past) or default
        reference = difference.before.peak_allocated if difference.before else 0
        both = difference.before is not None and difference.now is not None
        if not both or abs(difference.bytes) > allowed.allowance(max(reference, 0)):
            found.append(difference)
    return sorted(found, key=lambda one: (KINDS.index(one.kind), -abs(one.bytes), one.nodeid))


def difference_section(
    before: Sequence[TestRecord], now: Sequence[TestRecord], name: str
) -> Iterator[str]:
    """Yield the Markdown of the changes since ``before``, which is called ``name``."""
    old, new = _measured(before), _measured(now)
    if not {key[0] for key in old} & {key[0] for key in new}:
        missing = "holds no measured test" if not old else "was measured in another environment"
        yield f"**Against {code(name)}**: nothing to compare, because it {missing}."
        return
    found = differences(before, now)
    if not found:
        yield f"**Against {code(name)}**: no peak changed."
        return
    counts = {kind: sum(one.kind == kind for one in found) for kind in KINDS}
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    rows = table(("test", "before", "now", "change"), map(_row, found[:MOST_ROWS]))
    more = f"\n\nand {len(found) - MOST_ROWS} more" if len(found) > MOST_ROWS else ""
    yield f"**Against {code(name)}**: {kinds}\n\n{rows}{more}"
    for one in [one for one in found if one.kind == "grew"][:MOST_EXPLAINED]:
        assert one.before is not None
        assert one.now is not None
        if lines := list(explained(explain_peaks(one.before, one.now))):
            yield f"{code(one.nodeid)}\n{code_block(lines)}"


def explain_peaks(before: Measurement, now: Measurement) -> list[str]:
    """Return the lines on differing bytes; none where either side recorded no lines."""
    if not before.sites or not now.sites:
        return []
    changes = explain(map(Site.from_dict, now.sites), map(Site.from_dict, before.sites))
    return explanation_lines([change.to_dict() for change in changes])


def _measured(records: Sequence[TestRecord]) -> dict[Key, Measurement]:
    return {
        _key(record): record.measurement
        for record in records
        if record.measurement is not None and record.is_whole
    }


def _tolerances(records: Sequence[TestRecord]) -> dict[Key, Tolerance]:
    stated = {_key(record): record.expectation.get("tolerance") for record in records}
    return {key: parse_tolerance(text) for key, text in stated.items() if text is not None}


def _renamed(gone: Mapping[Key, Measurement], new: Mapping[Key, Measurement]) -> dict[Key, Key]:
    """Return the former names of renamed tests."""
    found: dict[Key, Key] = {}
    for environment in sorted({key[0] for key in gone}):
        old_peaks, new_peaks = (
            {_nodeid(key): _peaks(side[key]) for key in sorted(side) if key[0] == environment}
            for side in (gone, new)
        )
        for was, successor in successors(old_peaks, new_peaks).items():
            now = (environment, *split_nodeid(successor.nodeid))
            found[now] = (environment, *split_nodeid(was))
    return found


def _peaks(measurement: Measurement) -> tuple[tuple[str, int], ...]:
    phases = {name: phase.peak_allocated for name, phase in measurement.phases.items()}
    return tuple(sorted({"": measurement.peak_allocated, **phases}.items()))


def _key(record: TestRecord) -> Key:
    return (record.environment.key, *split_nodeid(record.nodeid))


def _nodeid(key: Key) -> str:
    return "::".join(filter(None, key[1:]))


def _row(one: Difference) -> tuple[str, ...]:
    name = code(one.nodeid) + (f" (was {code(one.was)})" if one.was else "")
    if one.before is None or one.now is None:
        sizes = (format_size(m.peak_allocated) if m else "-" for m in (one.before, one.now))
        return (name, *sizes, one.kind)
    before, now = one.before.peak_allocated, one.now.peak_allocated
    change = change_text(before, now) if now != before else "same"
    return name, format_size(before), format_size(now), change
