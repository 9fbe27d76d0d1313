"""Renamed tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from itertools import takewhile
from typing import NamedTuple, TypeVar

from pytest_gpumem.baseline.store import split_nodeid

T = TypeVar("T", bound=Hashable)

LEAST_ALIKE = 0.5
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
    tells: Callable[[T], bool] = lambda measured: False,
) -> dict[str, Successor]:
    """Return by node id the ``new`` test that each ``gone`` test has probably become.

    Both hold measured numbers. Where these are equal, names have to be alike by half, or the
    numbers ``tells`` a test by themselves and are unique; where they differ, by ``unlike``. Every
    test takes the place of one at most, the most similar first.
    """
    often = Counter([*gone.values(), *new.values()])
    pairs = []
    for position, (old, before) in enumerate(gone.items()):
        for name, measured in new.items():
            same, alike = measured == before, _alike(old, name)
            alone = same and often[measured] == 2 and tells(measured)
            if alone or alike >= (LEAST_ALIKE if same else unlike):
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
