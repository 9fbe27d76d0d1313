"""Stored baselines without a test, and the tests that have probably taken their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_gpumem.baseline.collected import Collected, GoneTests
from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from pytest_gpumem.baseline.update import MeasuredTest
    from pytest_gpumem.values.environment import Environment

T = TypeVar("T", bound=Hashable)

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
    gone = GoneTests(collected, frozenset(split_nodeid(test.nodeid) for test in tests))
    environments = {test.environment.key: test.environment for test in tests}
    found: list[Unused] = []
    for environment in environments.values():
        unused = list(_unused(store, environment, gone))
        new = _new_tests(store, environment, tests) if unused else {}
        named = successors(
            {one.nodeid: _numbers(one.entry) for one in unused},
            {nodeid: _numbers(entry) for nodeid, entry in new.items()},
            unlike=LEAST_ALIKE,
            identifies=lambda numbers: numbers.peak_allocated >= TELLING,
        )
        for one in unused:
            if successor := named.get(one.nodeid):
                one = replace(one, successor=successor.nodeid, same=successor.same)
            found.append(one)
    return sorted(found, key=lambda one: (one.environment.key, one.nodeid))


def _unused(store: BaselineStore, environment: Environment, gone: GoneTests) -> Iterator[Unused]:
    for module in store.modules(environment):
        if gone.can_prove(module):
            with suppress(BaselineError):
                entries = store.load(environment, module)
                for test_id in gone.among(module, entries)[0]:
                    yield Unused(f"{module}::{test_id}", environment, entries[test_id])


def _new_tests(
    store: BaselineStore, environment: Environment, tests: Sequence[MeasuredTest]
) -> dict[str, BaselineEntry]:
    """Return by node id the measured numbers of tests without an entry of their own."""
    found = {}
    for test in tests:
        if test.environment == environment and test.wanted:
            with suppress(BaselineError):
                if store.entry(environment, *split_nodeid(test.nodeid)) is None:
                    found[test.nodeid] = BaselineEntry.of(test.measurement)
    return found


class _Numbers(NamedTuple):
    """The compared numbers of an entry."""

    peak_allocated: int
    peak_reserved: int
    phases: tuple[tuple[str, int], ...]


def _numbers(entry: BaselineEntry) -> _Numbers:
    phases = tuple(sorted(entry.phases.items()))
    return _Numbers(entry.peak_allocated, entry.peak_reserved, phases)


SAME_NUMBERS_ALIKE = 0.5
"""Ratio from which on two names are similar, where all numbers are equal."""
ONLY_MOVED = 1.0
"""Ratio for tests that differ only in the path of their module."""


class Successor(NamedTuple):
    """The test that has probably taken the place of one that is gone."""

    nodeid: str
    same: bool
    """Whether its measured numbers are the same."""


def successors(
    gone: Mapping[str, T],
    new: Mapping[str, T],
    *,
    unlike: float = ONLY_MOVED,
    identifies: Callable[[T], bool] = lambda measured: False,
) -> dict[str, Successor]:
    """Return by node id the ``new`` test that each ``gone`` test has probably become.

    Both hold measured numbers. Where these are equal, names have to be alike by half, or the
    numbers ``identifies`` a test by themselves and are unique; where they differ, by ``unlike``. Every
    test takes the place of one at most, the most similar first.
    """
    often = Counter([*gone.values(), *new.values()])
    pairs = []
    for position, (old, before) in enumerate(gone.items()):
        for name, measured in new.items():
            same, alike = measured == before, _alike(old, name)
            unique = same and often[measured] == 2 and identifies(measured)
            if unique or alike >= (SAME_NUMBERS_ALIKE if same else unlike):
                pairs.append((not same, -alike, position, old, name))
    found: dict[str, Successor] = {}
    taken: set[str] = set()
    for differs, _, _, old, name in sorted(pairs):
        if old not in found and name not in taken:
            found[old] = Successor(name, not differs)
            taken.add(name)
    return found


def _alike(old: str, new: str) -> float:
    """Return how much of two tests' names is the same at their ends; modules do not count."""
    names = [split_nodeid(nodeid)[1].replace("test_", "") for nodeid in (old, new)]
    if names[0] == names[1]:
        return 1.0
    head = _same_letters(*names)
    tail = _same_letters(*(name[head:][::-1] for name in names))
    return 2 * (head + tail) / sum(map(len, names))


def _same_letters(one: str, other: str) -> int:
    """Return with how many letters both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
