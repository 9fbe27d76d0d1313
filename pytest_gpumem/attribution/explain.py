"""The differences between two compositions: changes by source line, largest first."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import zip_longest
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.sizes import ALLOCATOR_BLOCK
from pytest_gpumem.text import listed
from pytest_gpumem.values.operator_names import FUSED

MOST_SITES = 24
"""The most sites of a phase in a baseline; smaller ones are summed up by function."""

Key = tuple[str, str | None, str | None, str | None]


@dataclass(frozen=True)
class Change:
    """A site that differs; ``bytes`` is its growth, negative if it has shrunk."""

    bytes: int
    change: str
    """``new``, ``grown``, ``shrunk`` or ``gone``."""
    site: Site
    """The current site; if only the number of equal blocks grew, with the additional blocks."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with ``each`` if whole blocks of one size were added or removed."""
        size = block_size(self.site)
        whole = size is not None and size * self.site.count == abs(self.bytes)
        return {
            **self.site.to_dict(),
            "bytes": self.bytes,
            "change": self.change,
            "each": size if whole else None,
        }


def block_size(site: Site) -> int | None:
    """Return the bytes of each block of ``site``, ``None`` if they differ or are unknown."""
    if site.each is not None or site.count == 1:
        return site.bytes if site.each is None else site.each
    bits = re.search(r"\d+|bool", site.dtype or "")
    if site.shape is None or bits is None:
        return None
    # Only the largest shape is stored: all blocks have it if its bytes times count is the sum.
    elements = math.prod(site.shape)
    largest = elements * (1 if bits[0] == "bool" else int(bits[0]) // 8)
    rounded = -(-largest // ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK
    return rounded if rounded * site.count == site.bytes else None


def explain(
    actual: Iterable[Site], reference: Iterable[Site], *, compiled: bool | None = None
) -> tuple[Change, ...]:
    """Return the changes from ``reference`` to ``actual``, which sum to the whole difference.

    Lines may have moved: sites with equal category, module, function and operator match. If only
    one side is ``compiled`` code, operators differ, and all blocks of a line and category are one
    site; without that argument, fused operators show which side is compiled. ``reference`` may have
    been compacted by :func:`compact`.
    """
    now, before = list(actual), list(reference)
    least = {"gone": 0, "new": 0}
    if any(map(_is_rest, before)):
        now = list(compact(now))
        least = {"gone": _least_named(now), "new": _least_named(before)}
    sides = _by_key(now), _by_key(before)
    changes: Iterable[Change] = [
        _change(*pair)
        for key in {**sides[0], **sides[1]}
        for pair in _pairs(*(side.get(key, ()) for side in sides))
    ]
    # Temporaries may be kept for backward; functions and modules are renamed.
    for identity in _IDENTITIES:
        changes = _joined(changes, identity)
    if _has_fused(now) != _has_fused(before) if compiled is None else compiled:
        changes = _by_line(changes)
    changed = [change for change in _without_edge(changes, least) if change.bytes]
    return tuple(sorted(changed, key=lambda c: (-abs(c.bytes), -c.bytes, str(c.site))))


def holdings(actual: Iterable[Site]) -> tuple[Change, ...]:
    """Return all sites of ``actual`` as changes from nothing, most bytes first."""
    return tuple(Change(site.bytes, "new", site) for site in actual)


def compact(sites: Sequence[Site], most: int = MOST_SITES) -> tuple[Site, ...]:
    """Return the ``most`` largest sites, and the rest as one site per category and function."""
    ordered = sorted(sites, key=lambda site: (-site.bytes, str(site)))
    groups: dict[tuple[str, str | None], list[Site]] = defaultdict(list)
    for site in ordered[most:]:
        groups[site.category, site.function].append(site)
    rests = [
        Site(
            category,
            sum(site.bytes for site in group),
            sum(site.count for site in group),
            site=group[0].site,  # that of the largest one
            function=function,
        )
        for (category, function), group in groups.items()
    ]
    return (*ordered[:most], *rests)


def _is_rest(site: Site) -> bool:
    return site.operator is None and site.module is None


def _least_named(sites: Iterable[Site]) -> int:
    return min((site.bytes for site in sites if not _is_rest(site)), default=0)


def _without_edge(changes: Iterable[Change], least: Mapping[str, int]) -> Iterator[Change]:
    """Yield ``changes``; a site too small to be named on the other side is merged into the rest.

    ``least`` is the smallest named size on the other side, for gone and for new sites.
    """
    rests: dict[tuple[str, str | None], Change] = {}
    for change in changes:
        site = change.site
        one_sided = change.change in least and abs(change.bytes) <= least[change.change]
        if not _is_rest(site) and not one_sided:
            yield change
            continue
        key = site.category, site.function
        total = change.bytes + (rests[key].bytes if key in rests else 0)
        kept = rests[key].site if key in rests and _is_rest(rests[key].site) else site
        rests[key] = Change(total, "grown" if total > 0 else "shrunk", kept)
    yield from rests.values()


def _by_key(sites: Iterable[Site]) -> dict[Key, list[Site]]:
    found: dict[Key, list[Site]] = defaultdict(list)
    for site in sites:
        found[site.category, site.module, site.function, site.operator].append(site)
    for group in found.values():
        group.sort(key=lambda site: int(site.site.rpartition(":")[2]) if site.site else 0)
    return found


def _pairs(
    actual: Sequence[Site], reference: Sequence[Site]
) -> Iterator[tuple[Site | None, Site | None]]:
    """Yield pairs of sites of one function and operator: equal ones first."""
    one, other = (
        [(site.bytes, site.count, site.shape, site.dtype) for site in side]
        for side in (actual, reference)
    )
    matcher = SequenceMatcher(None, other, one, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            yield from zip_longest(actual[j1:j2], reference[i1:i2])


def _change(now: Site | None, before: Site | None) -> Change:
    if now is None:
        assert before is not None
        return Change(-before.bytes, "gone", before)
    if before is None:
        return Change(now.bytes, "new", now)
    difference = now.bytes - before.bytes
    word = "grown" if difference > 0 else "shrunk"
    if now.bytes * before.count == before.bytes * now.count:
        # More blocks of the same size: give the number of additional ones.
        now = replace(now, count=abs(now.count - before.count))
    return Change(difference, word, now)


def _joined(
    changes: Iterable[Change], identity: Callable[[Site], tuple[Any, ...]]
) -> Iterator[Change]:
    """Yield ``changes``, with gone and new sites of the same ``identity`` merged."""
    gone: dict[tuple[Any, ...], list[Change]] = defaultdict(list)
    others = []
    for change in changes:
        if change.change == "gone":
            gone[identity(change.site)].append(change)
        else:
            others.append(change)
    for change in others:
        partners = gone.get(identity(change.site)) if change.change == "new" else None
        if partners:
            before = partners.pop(0)
            difference = change.bytes + before.bytes
            word = "grown" if difference > 0 else "shrunk"
            yield replace(change, bytes=difference, change=word)
        else:
            yield change
    for left in gone.values():
        yield from left


def _has_fused(sites: Iterable[Site]) -> bool:
    return any((site.operator or "").endswith(FUSED) for site in sites)


def _by_line(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield ``changes``, with those of one line and category merged."""
    lines: dict[object, list[Change]] = defaultdict(list)
    for index, change in enumerate(changes):
        site = change.site
        key = index if site.site is None or _is_rest(site) else (site.category, site.site)
        lines[key].append(change)
    for group in lines.values():
        there = [change for change in group if change.change != "gone"] or group
        shown = max(there, key=lambda change: abs(change.bytes))
        words = {change.change for change in group}
        total = sum(change.bytes for change in group)
        word = words.pop() if len(words) == 1 else "grown" if total > 0 else "shrunk"
        yield replace(shown, bytes=total, change=word) if len(group) > 1 else shown


_IDENTITIES: tuple[Callable[[Site], tuple[Any, ...]], ...] = (
    lambda site: (
        *(site.module, site.function, site.operator, site.dtype),
        site.category if _is_rest(site) else "",
    ),
    lambda site: (site.category, site.operator, site.shape, site.dtype, site.count),
)
"""The fields that identify a site whose category changed, and one whose function changed."""

MOST = 0.5
"""The part of a difference that evidence has to exceed. Only one of several disjoint causes can be
more than half; with a smaller part, the order of the detectors could decide between two."""
MOST_NAMED = 3
"""The most modules that a sentence names, so that it fits into two lines of 80 columns."""

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """The sites of one run at its peak, and its facts."""

    sites: Sequence[Site]
    facts: Facts = field(default_factory=dict)

    @cached_property
    def categories(self) -> Counter[str]:
        """The bytes by category."""
        found = Counter[str]()
        for site in self.sites:
            found[site.category] += site.bytes
        return found


@dataclass(frozen=True)
class Growth:
    """The comparison of two runs of one test; the later one needs more memory."""

    now: Side
    before: Side
    changes: Sequence[Change] = ()

    @cached_property
    def bytes(self) -> int:
        """The whole difference in bytes."""
        return sum(change.bytes for change in self.changes)

    @cached_property
    def gains(self) -> Sequence[Change]:
        """The sites that have grown."""
        return [change for change in self.changes if change.bytes > 0]

    def facts(self, name: str) -> tuple[Any, Any]:
        """Return one of the facts, of the later and the earlier run; empty if unknown."""
        return self.now.facts.get(name) or {}, self.before.facts.get(name) or {}

    def gained(self, *categories: str) -> int:
        """Return the growth of these categories together, in bytes."""
        return sum(self.now.categories[one] - self.before.categories[one] for one in categories)

    @property
    def compares_facts(self) -> bool:
        """Whether both runs have facts."""
        return bool(self.now.facts) and bool(self.before.facts)


def largest_gain(growth: Growth) -> Change | None:
    """Return the largest growth of one line and operator, preferably with known ones."""
    groups: defaultdict[object, list[Change]] = defaultdict(list)
    for index, change in enumerate(growth.gains):
        site = change.site
        key = site.category, site.site, site.operator, change.change
        groups[key if site.site else index].append(change)
    gains = list(groups.values())
    named = [group for group in gains if group[0].site.site or group[0].site.operator] or gains
    changes = max(named, key=lambda group: sum(one.bytes for one in group), default=[])
    if not changes:
        return None
    first = changes[0]
    sites = [change.site for change in changes]
    # With shape and dtype if all of them agree.
    differing: dict[str, Any] = {
        name: None
        for name in ("shape", "dtype", "module")
        if len({getattr(site, name) for site in sites}) > 1
    }
    nbytes, count = sum(site.bytes for site in sites), sum(site.count for site in sites)
    site = replace(first.site, bytes=nbytes, count=count, **differing)
    return replace(first, bytes=sum(one.bytes for one in changes), site=site)


def site_text(site: Site) -> str:
    """Return a site's line and operator for a sentence: ``model.py:71 (torch.softmax)``."""
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
