"""Two runs of one test as evidence: what each held and did, and how they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import Change

MOST = 0.5
"""The part of a difference that evidence has to exceed. Of causes that share no bytes one alone can
be more than half of it; with a smaller part the order of the detectors would decide between two."""
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
    """Return what one line added most of by one operator, one with a place or an operator where
    there is one."""
    groups: defaultdict[object, list[Change]] = defaultdict(list)
    for index, change in enumerate(growth.changes):
        if change.bytes > 0:
            site = change.site
            key = site.category, site.site, site.operator, change.change
            groups[key if site.site else index].append(change)
    gains = [_as_one(group) for group in groups.values()]
    named = [change for change in gains if change.site.site or change.site.operator] or gains
    return max(named, key=lambda change: change.bytes, default=None)


def _as_one(changes: Sequence[Change]) -> Change:
    """Return ``changes`` of one line, with a shape and a dtype where all have the same."""
    first = changes[0]
    shapes, dtypes = ({getattr(one.site, key) for one in changes} for key in ("shape", "dtype"))
    modules = {one.site.module for one in changes}
    site = replace(
        first.site,
        bytes=sum(one.site.bytes for one in changes),
        count=sum(one.site.count for one in changes),
        shape=first.site.shape if len(shapes) == 1 else None,
        dtype=first.site.dtype if len(dtypes) == 1 else None,
        module=first.site.module if len(modules) == 1 else None,
    )
    return replace(first, bytes=sum(one.bytes for one in changes), site=site)


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
