"""Stored baselines without a test, and the tests that have probably taken their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.baseline.collected import Collected, Gone
from pytest_gpumem.baseline.renamed import successors
from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from pytest_gpumem.baseline.update import MeasuredTest
    from pytest_gpumem.values.environment import Environment

LEAST_ALIKE = 0.8
"""Ratio from which on two names are similar, where their numbers differ."""
TELLING = MIB
"""Bytes from which on unique numbers identify a test."""


@dataclass(frozen=True)
class Unused:
    """A stored entry without a test."""

    nodeid: str
    environment: Environment
    entry: BaselineEntry
    successor: str | None = None
    """The node id of the test that has probably taken its place."""
    same: bool = False
    """Whether it measures what is stored."""


def unused_baselines(
    store: BaselineStore, tests: Sequence[MeasuredTest], collected: Collected
) -> list[Unused]:
    """Return the entries of the environments of ``tests`` that no test uses, sorted by node id.

    Only those that ``collected`` proves gone; unreadable files are reported elsewhere.
    """
    gone = Gone(collected, frozenset(split_nodeid(test.nodeid) for test in tests))
    environments = {test.environment.key: test.environment for test in tests}
    found: list[Unused] = []
    for environment in environments.values():
        unused = list(_unused(store, environment, gone))
        if unused:
            new = _new_tests(store, environment, tests)
            found += _with_successors(unused, new)
    return sorted(found, key=lambda one: (one.environment.key, one.nodeid))


def _unused(store: BaselineStore, environment: Environment, gone: Gone) -> Iterable[Unused]:
    for module in store.modules(environment):
        if not gone.may_tell(module):
            continue
        try:
            entries = store.load(environment, module)
        except BaselineError:
            continue
        for test_id in gone.of(module, entries)[0]:
            yield Unused(f"{module}::{test_id}", environment, entries[test_id])


def _new_tests(
    store: BaselineStore, environment: Environment, tests: Sequence[MeasuredTest]
) -> dict[str, BaselineEntry]:
    """Return by node id the measured numbers of tests without an entry of their own."""
    found = {}
    for test in tests:
        if test.environment != environment or not test.wanted:
            continue
        try:
            stored = store.entry(environment, *split_nodeid(test.nodeid))
        except BaselineError:
            continue
        if stored is None:
            found[test.nodeid] = BaselineEntry.of(test.measurement)
    return found


def _with_successors(
    unused: Sequence[Unused], new: Mapping[str, BaselineEntry]
) -> Iterable[Unused]:
    """Yield ``unused`` with the test that each has probably become."""
    found = successors(
        {one.nodeid: _numbers(one.entry) for one in unused},
        {nodeid: _numbers(entry) for nodeid, entry in new.items()},
        unlike=LEAST_ALIKE,
        tells=lambda numbers: numbers.peak_allocated >= TELLING,
    )
    for one in unused:
        successor = found.get(one.nodeid)
        if successor is None:
            yield one
        else:
            yield replace(one, successor=successor.nodeid, same=successor.same)


class _Numbers(NamedTuple):
    """The compared numbers of an entry."""

    peak_allocated: int
    peak_reserved: int
    phases: tuple[tuple[str, int], ...]


def _numbers(entry: BaselineEntry) -> _Numbers:
    phases = tuple(sorted(entry.phases.items()))
    return _Numbers(entry.peak_allocated, entry.peak_reserved, phases)
