"""Bytes by category and by source line at a peak."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import PurePath

from pytest_gpumem.attribution.history import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    BlockLifetime,
    History,
    Origin,
)
from pytest_gpumem.values.serialization import OMITTED, Plain

MOST_VIEWS = 8
"""The most consecutive autograd nodes whose forward operators allocate nothing."""

COMPILED = "CompiledFunctionBackward"
"""The autograd node of a whole compiled graph, which belongs to no single operator: each buffer has
its own origin (torch/_functorch/_aot_autograd/runtime_wrappers.py)."""


@dataclass(frozen=True)
class Site(Plain):
    """Blocks of one category, source line and operator; ``bytes`` is the sum of all ``count``."""

    category: str
    bytes: int
    count: int = 1
    site: str | None = None
    """``path:line``"""
    function: str | None = None
    operator: str | None = None
    module: str | None = None
    """Path of the module, as :func:`general_path` gives it."""
    shape: tuple[int, ...] | None = None
    """Shape of the largest of them."""
    dtype: str | None = None
    held_by: str | None = field(default=None, metadata=OMITTED)
    """The variable that keeps them, if it was searched for."""
    each: int | None = field(default=None, metadata=OMITTED)
    """Bytes of each block, if all have the same size."""


@dataclass(frozen=True)
class Composition:
    """The live blocks at a peak: bytes by category, and by source line, most bytes first."""

    categories: Mapping[str, int]
    sites: tuple[Site, ...]

    @property
    def total(self) -> int:
        """The bytes at the peak."""
        return sum(self.categories.values())


def with_rest_as_other(composition: Composition, total: int) -> Composition:
    """Return ``composition`` with its difference from ``total`` bytes as the category "other".

    A real allocator allocates more than requested if it does not split a block.
    """
    rest = total - composition.total
    if not rest:
        return composition
    categories = dict(composition.categories)
    categories[OTHER] = categories.get(OTHER, 0) + rest
    site = Site(OTHER, rest, operator="allocator")
    sites = sorted((*composition.sites, site), key=lambda site: (-site.bytes, str(site)))
    return Composition(categories, tuple(sites))


def compositions(history: History) -> dict[str, Composition]:
    """Return the composition at the peak of each phase, by its name."""
    forward = ForwardLifetimes(history.lifetimes)
    places: dict[int, Site] = {}
    known: dict[int, Composition] = {}
    found = {}
    for phase, position in history.peaks().items():
        if position not in known:
            live = history.live_at(position)
            for life in live:
                # A long-lived block is part of several peaks.
                if id(life) not in places:
                    places[id(life)] = _place(history, life, forward)
            running = (
                _running_module(history, position, forward) if any(map(_is_buffer, live)) else ""
            )
            known[position] = _composition(
                (_with_overlap(places[id(life)], life, running), life) for life in live
            )
        found[phase] = known[position]
    return found


def composition_of(
    history: History, lives: Iterable[BlockLifetime], holders: Mapping[int, str]
) -> Composition:
    """Return the composition of ``lives``; ``holders`` are the variables that keep them."""
    forward = ForwardLifetimes(history.lifetimes)
    placed = ((_place(history, life, forward), life) for life in lives)
    return _composition(
        (replace(place, held_by=holders.get(life.address)), life) for place, life in placed
    )


def _composition(placed: Iterable[tuple[Site, BlockLifetime]]) -> Composition:
    groups: dict[Site, list[BlockLifetime]] = {}
    for place, life in placed:
        groups.setdefault(place, []).append(life)
    sites = sorted(
        (_sum(place, group) for place, group in groups.items()),
        key=lambda site: (-site.bytes, str(site)),
    )
    categories = {
        category: total
        for category in CATEGORIES
        if (total := sum(site.bytes for site in sites if site.category == category))
    }
    return Composition(categories, tuple(sites))


def _place(history: History, life: BlockLifetime, forward: ForwardLifetimes) -> Site:
    """Return the site of a block with 0 bytes, so that blocks of one site are equal."""
    origin, seen = life.origin, life.observation
    category = category_of(history, life)
    if category == WORKSPACE:
        # The first operator that needs a workspace allocates it, so no line is its cause.
        return Site(category, 0, 0, operator=(origin and origin.library) or "cuBLAS")
    if origin is None:
        return Site(category, 0, 0, module=general_path(seen.module) if seen else None)
    in_backward = origin.node not in (None, COMPILED) and not history.module_at(life.made_at)
    source = forward.of(origin) if in_backward else None
    place = (source and source.origin and history.place_of(source.origin)) or history.place_of(
        origin
    )
    module = seen.module if seen else ""
    named = origin.kind in _OF_SHARDING
    operator = origin.node if in_backward and not named else origin.operator_name
    if seen and category == OPTIMIZER_STATE:
        operator = seen.name
    elif seen and named and operator:
        operator = operator.partition(" of ")[0]  # a gradient, whose module is known
    elif seen and category == OTHER:
        operator = f"buffer {general_path('.'.join(filter(None, (module, seen.name))))}"
    return Site(
        category,
        0,
        0,
        site=None if place is None else f"{shown_path(place[0], history.root)}:{place[1]}",
        function=None if place is None else place[2],
        operator=operator,
        module=general_path(module or history.module_at((source or life).made_at)) or None,
        dtype=None if origin.dtype is None else str(origin.dtype).removeprefix("torch."),
    )


def _sum(place: Site, lives: Sequence[BlockLifetime]) -> Site:
    largest = max(lives, key=lambda life: life.nbytes)
    shape = largest.origin.shape if largest.origin else None
    total = sum(life.nbytes for life in lives)
    return Site(
        **{
            **vars(place),
            "bytes": total,
            "count": len(lives),
            "each": largest.nbytes if largest.nbytes * len(lives) == total else None,
            "shape": None if shape is None else tuple(shape),
        }
    )


_OF_SHARDING = {"unsharded": PARAMETERS, "buffer": OTHER}
"""Categories by the kind that a library gives to its allocation."""
_OF_ROOT = "the root"


def _is_buffer(life: BlockLifetime) -> bool:
    return life.origin is not None and life.origin.kind == "buffer"


def _running_module(history: History, position: int, forward: ForwardLifetimes) -> str:
    """Return the path of the module that runs at ``position``, in forward or backward."""
    module = history.module_at(position)
    before = (life for life in reversed(history.lifetimes) if 0 <= life.made_at <= position)
    for life in before if not module else ():
        origin = life.origin
        if origin is not None and origin.node is not None and not _is_buffer(life):
            source = forward.of(origin)
            if source is not None:
                return history.module_at(source.made_at)
    return module


def _with_overlap(place: Site, life: BlockLifetime, running: str) -> Site:
    """Add the running module's name to the buffer of another module, whose lifetime overlaps."""
    if not running or not _is_buffer(life) or place.operator is None:
        return place
    path = place.operator.partition(" of ")[2]
    shown = ".".join(running.split(".")[: path.count(".") + 1])
    if path in ("", _OF_ROOT) or f"{path}.".startswith(f"{shown}."):
        return place
    return replace(place, operator=f"{place.operator} overlaps {shown}")


def category_of(history: History, life: BlockLifetime) -> str:
    """Return the category of a block: as observed, else by its lifetime.

    A tensor that autograd saved, or that the forward returned, outlives the forward and is an
    activation. A tensor that only one operator needs does not, and is a temporary.
    """
    known = _known_category(history, life)
    if history.classify is None or life.origin is None:
        return known
    return history.classify(known, life.nbytes, life.origin)


def _known_category(history: History, life: BlockLifetime) -> str:
    origin = life.origin
    if life.observation is not None:
        return life.observation.category
    if origin is None:
        return OTHER
    if origin.library:
        return WORKSPACE
    if origin.kind in _OF_SHARDING:
        return _OF_SHARDING[origin.kind]
    span = history.span_at(life.made_at)
    if span is None:
        if origin.kind in ("copy", "factory"):
            return INPUTS if origin.kind == "copy" else OTHER
        if life.freed_at < history.next_backward(life.made_at):
            return TEMPORARIES
        # Autograd recorded no node, so backward does not need it: for example a copy of parameters.
        return ACTIVATIONS if origin.has_node else OTHER
    survives = life.freed_at >= span.end
    if span.name == "step":
        return OPTIMIZER_STATE if survives else TEMPORARIES
    if span.name == "backward" and not history.module_at(life.made_at):
        return GRADIENTS if survives else TEMPORARIES
    # Checkpointing runs modules again within backward.
    return ACTIVATIONS if survives or span.name == "backward" else TEMPORARIES


class ForwardLifetimes:
    """A lookup of the forward operator whose autograd node runs in backward."""

    def __init__(self, lives: Iterable[BlockLifetime]) -> None:
        found: dict[int, BlockLifetime] = {}
        for life in lives:
            origin = life.origin
            if origin is not None and origin.node is None and origin.kind == "computed":
                # A node gets its number just before its operator runs, so the operator's blocks
                # have the next number; so have those of following operators without a node.
                found.setdefault(origin.sequence - 1, life)
        self._numbers = sorted(found)
        self._lifetimes = found

    def of(self, origin: Origin) -> BlockLifetime | None:
        """Return a block of the forward operator to which ``origin``'s node belongs.

        Views allocate nothing: for their nodes it is a block of a preceding operator.
        """
        index = bisect_right(self._numbers, origin.sequence) - 1
        if index < 0 or origin.sequence - self._numbers[index] > MOST_VIEWS:
            return None
        return self._lifetimes[self._numbers[index]]


@cache
def shown_path(filename: str, root: str) -> str:
    """Return ``filename`` relative to ``root`` or to its package's folder; never absolute."""
    path = PurePath(filename)
    inside = bool(root) and path.is_relative_to(root)
    if inside:
        path = path.relative_to(root)
    parts = path.parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:  # also for a virtual environment inside the project
            return "/".join(parts[parts.index(folder) + 1 :])
    return path.as_posix() if inside else path.name


@cache
def general_path(module: str) -> str:
    """Return the path of a module with ``*`` for its numbers: ``blocks.*.attn``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
