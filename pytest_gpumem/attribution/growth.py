"""Two runs of one test as evidence: what each held and did, and how they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import Change

MOST = 0.5
"""The part of a difference that evidence has to exceed: of causes that share no bytes, one alone can
be most of it. Any smaller part would let the order of the detectors decide between two."""
MOST_NAMED = 3
"""Modules that a sentence names, for it to fit into two lines of 80 columns."""

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """The sites that one run held at its peak, and its facts."""

    sites: Sequence[Site]
    facts: Facts = field(default_factory=dict)

    @cached_property
    def categories(self) -> Mapping[str, int]:
        """The bytes by category."""
        found: defaultdict[str, int] = defaultdict(int)
        for site in self.sites:
            found[site.category] += site.bytes
        return found

    def fact(self, name: str) -> Any:
        """Return one of the facts, ``None`` where it is not known or did not occur."""
        return self.facts.get(name)


@dataclass(frozen=True)
class Growth:
    """Two runs of one test, of which the second takes more."""

    now: Side
    before: Side
    changes: Sequence[Change] = ()

    @cached_property
    def bytes(self) -> int:
        """The whole difference in bytes."""
        return sum(change.bytes for change in self.changes)

    def gained(self, *categories: str) -> int:
        """Return by how much these categories together grew."""
        return sum(
            self.now.categories.get(one, 0) - self.before.categories.get(one, 0)
            for one in categories
        )

    def is_most(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` account for most of the difference."""
        return nbytes > 0 and nbytes > MOST * self.bytes

    @property
    def compares_facts(self) -> bool:
        """Whether both runs have facts."""
        return bool(self.now.facts) and bool(self.before.facts)


def largest_gain(growth: Growth) -> Change | None:
    """Return the change that added most, one with a place or an operator where there is one."""
    gains = [change for change in growth.changes if change.bytes > 0]
    named = [change for change in gains if change.site.site or change.site.operator] or gains
    return max(named, key=lambda change: change.bytes, default=None)


def place(site: Site) -> str:
    """Return where a site is, as a sentence names it: ``model.py:71 (torch.softmax)``."""
    operator = f"({site.operator})" if site.operator and site.site else site.operator or ""
    return " ".join(filter(None, (site.site, operator)))


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as torch prints it."""
    return f"({', '.join(map(str, shape))})"


def names_text(names: Iterable[str]) -> str:
    """Return the first of ``names`` as a sentence lists them."""
    ordered = sorted(names)
    more = [f"{len(ordered) - MOST_NAMED} more"] if len(ordered) > MOST_NAMED else []
    return listed([*ordered[:MOST_NAMED], *more])


def listed(names: Sequence[str]) -> str:
    """Return ``names`` as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
