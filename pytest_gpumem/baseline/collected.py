"""The tests that a session collected, the stored tests without one, and their likely successors."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.sizes import MIB
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement


@dataclass(frozen=True)
class MeasuredTest:
    """The final result of one marked test of this session, on the device that baselines keep."""

    nodeid: str
    environment: Environment
    measurement: Measurement
    passed: bool
    """Whether the final call report passed, with the test's own verdicts; not xfail, not xpass."""
    rerun: bool = False
    """Whether an earlier attempt in this session did not pass."""
    subtest_failed: bool = False
    wanted: bool = True
    """``False`` if the marker has ``baseline=False``."""
    tolerance: str | None = None
    """The test's own tolerance for its baseline; ``None`` for the default."""


@dataclass(frozen=True)
class Collected:
    """The tests that this session collected, which shows whether a stored test still exists.

    A module counts as collected completely unless ``incomplete`` has a reason: a node id was given
    for it, its collection failed, or a plugin filtered its tests during collection (``--lf``).
    Reasons complete the sentence "2 stored tests not pruned: ...".
    """

    rootpath: Path
    """Pytest's rootdir, to which module paths are relative."""
    nodeids: Iterable[str]
    """The node ids of all collected items, deselected ones included."""
    incomplete: Mapping[str, str] = field(default_factory=dict)
    """Reason why the ids of a module may be incomplete, by module."""
    partial: str = ""
    """Reason why modules may exist that were not collected: ``paths were given``; empty if none."""
    narrowed: str = ""
    """Reason why any module may have more tests than were collected; empty if none."""
    ran: frozenset[tuple[str, str]] = frozenset()
    """Modules and ids of tests that ran, whether they were collected or not."""

    @cached_property
    def ids(self) -> Mapping[str, set[str]]:
        """The test ids of each module that was collected."""
        ids: dict[str, set[str]] = defaultdict(set)
        for nodeid in self.nodeids:
            module, test_id = split_nodeid(nodeid)
            ids[module].add(test_id)
        return dict(ids)

    def doubt(self, module: str) -> str:
        """Return why entries of ``module`` that were not collected may still have their tests."""
        reason = self.incomplete.get(module) or self.narrowed
        if reason or module in self.ids:
            return reason
        exists = (self.rootpath / module).exists()
        return self.partial or f"{module} exists, but nothing was collected from it" * exists

    def gone(self, module: str, stored: Iterable[str]) -> tuple[list[str], Mapping[str, int]]:
        """Return the ids in ``stored`` without a test, and the number of doubtful ones by reason.

        If the module still defines the function of a test that was not collected, an option or
        plugin may have hidden it. If the function was collected with other parameters, the test is
        gone.
        """
        ids = self.ids.get(module, ())
        unseen = [i for i in stored if i not in ids and (module, i) not in self.ran]
        if not unseen:
            return [], {}
        if doubt := self.doubt(module):
            return [], {doubt: len(unseen)}
        known = {function_of(test_id) for test_id in ids}
        gone, doubts = [], Counter[str]()
        for test_id in unseen:
            name = function_of(test_id)
            if name not in known and name in _functions_in(self.rootpath / module):
                doubts[f"{module} still defines {name}, which was not collected"] += 1
            else:
                gone.append(test_id)
        return gone, doubts


def function_of(test_id: str) -> str:
    """Return the function of a test's id, without parameters: ``TestX::test_y``."""
    return test_id.partition("[")[0]


@cache
def _functions_in(path: Path) -> frozenset[str]:
    try:
        return frozenset(_functions(ast.parse(path.read_text(encoding="utf-8")), ""))
    except (OSError, SyntaxError, ValueError):
        return frozenset()


def _functions(node: ast.AST, owner: str) -> Iterable[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{owner}{child.name}::")
        else:  # for example under a condition
            yield from _functions(child, owner)


T = TypeVar("T", bound=Hashable)

LEAST_ALIKE = 0.8
"""The least ratio of similar names, for tests whose numbers differ."""
TELLING = MIB
"""The least bytes with which unique numbers identify a test."""


@dataclass(frozen=True)
class Unused:
    """A stored entry without a test."""

    nodeid: str
    environment: Environment
    entry: BaselineEntry
    successor: str | None = None
    """The node id of the test that probably replaces it."""
    same: bool = False
    """Whether the successor's numbers equal the stored ones."""


def unused_baselines(
    store: BaselineStore, tests: Sequence[MeasuredTest], collected: Collected
) -> list[Unused]:
    """Return the entries of the environments of ``tests`` that no test uses, sorted by node id.

    Only those whose tests are certainly gone; unreadable files are reported elsewhere.
    """
    collected = replace(collected, ran=frozenset(split_nodeid(test.nodeid) for test in tests))
    environments = {test.environment.key: test.environment for test in tests}
    found: list[Unused] = []
    for environment in environments.values():
        unused = list(_unused(store, environment, collected))
        new = _new_tests(store, environment, tests) if unused else {}
        named = successors(
            {one.nodeid: _numbers(one.entry) for one in unused},
            {nodeid: _numbers(entry) for nodeid, entry in new.items()},
            unlike=LEAST_ALIKE,
            identifies=lambda numbers: numbers[0] >= TELLING,
        )
        for one in unused:
            successor, same = named.get(one.nodeid, (None, False))
            found.append(replace(one, successor=successor, same=same))
    return sorted(found, key=lambda one: (one.environment.key, one.nodeid))


def _unused(
    store: BaselineStore, environment: Environment, collected: Collected
) -> Iterator[Unused]:
    for module in store.modules(environment):
        if not collected.doubt(module):  # for all its stored tests
            with suppress(BaselineError):
                entries = store.load(environment, module)
                for test_id in collected.gone(module, entries)[0]:
                    yield Unused(f"{module}::{test_id}", environment, entries[test_id])


def _new_tests(
    store: BaselineStore, environment: Environment, tests: Sequence[MeasuredTest]
) -> dict[str, BaselineEntry]:
    """Return the measured numbers of tests without an entry, by node id."""
    found = {}
    for test in tests:
        if test.environment == environment and test.wanted:
            with suppress(BaselineError):
                module, test_id = split_nodeid(test.nodeid)
                if test_id not in store.load(environment, module):
                    found[test.nodeid] = BaselineEntry.of(test.measurement)
    return found


def _numbers(entry: BaselineEntry) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Return the compared numbers of an entry: peak allocated, peak reserved, by phase."""
    return entry.peak_allocated, entry.peak_reserved, tuple(sorted(entry.phases.items()))


SAME_NUMBERS_ALIKE = 0.5
"""The least ratio of similar names, for tests whose numbers are equal."""
ONLY_MOVED = 1.0
"""The ratio of tests that differ only in the path of their module."""


def successors(
    gone: Mapping[str, T],
    new: Mapping[str, T],
    *,
    unlike: float = ONLY_MOVED,
    identifies: Callable[[T], bool] = lambda measured: False,
) -> dict[str, tuple[str, bool]]:
    """Return the ``new`` test that probably replaces each ``gone`` one, and if numbers are equal.

    Both arguments have measured numbers by node id. Tests with equal numbers match if half of their
    names is similar, or if the numbers are unique; tests with different numbers match if names are
    similar by ``unlike``. Each new test replaces at most one; the most similar pairs come first.
    """
    often = Counter([*gone.values(), *new.values()])
    pairs = []
    for position, (old, before) in enumerate(gone.items()):
        for name, measured in new.items():
            same, alike = measured == before, _name_similarity(old, name)
            unique = same and often[measured] == 2 and identifies(measured)
            if unique or alike >= (SAME_NUMBERS_ALIKE if same else unlike):
                pairs.append((not same, -alike, position, old, name))
    found: dict[str, tuple[str, bool]] = {}
    taken: set[str] = set()
    for differs, _, _, old, name in sorted(pairs):
        if old not in found and name not in taken:
            found[old] = name, not differs
            taken.add(name)
    return found


def _name_similarity(old: str, new: str) -> float:
    """Return the ratio of two tests' names, without modules, that is equal at start and end."""
    names = [split_nodeid(nodeid)[1].replace("test_", "") for nodeid in (old, new)]
    if names[0] == names[1]:
        return 1.0
    head = _same_letters(*names)
    tail = _same_letters(*(name[head:][::-1] for name in names))
    return 2 * (head + tail) / sum(map(len, names))


def _same_letters(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
