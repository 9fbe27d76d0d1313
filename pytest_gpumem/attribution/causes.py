"""The cause of a growth: one sentence from the blocks and facts of two runs.

Each detector reads one kind of evidence, and its sentence counts only if the evidence explains most
of the difference. The first such sentence is the cause; the most specific detectors come first. If
there is none, the sentence states the largest change.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import (
    MOST,
    Growth,
    Side,
    block_size,
    largest_gain,
    shape_text,
    site_text,
)
from pytest_gpumem.attribution.history import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from pytest_gpumem.attribution.program_causes import (
    PROGRAM_CAUSES,
    Evidence,
    carried_sentence,
    steady_step,
    unfused_sentence,
    variables,
)
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import listed

CAST = "Tensor.to"
"""The operator that autograd records for ``float()``, ``half()`` and ``to(dtype)``."""

GRAPH_OF = "the graph of "
"""Prefix of a holder's name if its autograd graph keeps the memory."""


def cause_of(growth: Growth) -> str:
    """Return the cause of ``growth`` as a sentence, empty if unknown."""
    if growth.bytes <= 0:
        return ""
    found = (evidence for detector in DETECTORS for evidence in detector(growth))
    sentences = (sentence for nbytes, sentence in found if nbytes > MOST * growth.bytes)
    return next(filter(None, sentences), "")


def absolute_cause(now: Side, excess: int) -> str:
    """Return the reason why a number is over a limit, from the run's facts; empty if unknown."""
    carried, attention = now.facts.get("carried") or {}, now.facts.get("attention") or {}
    for holder in carried.get("holders", ()):
        if steady_step(holder["held"]) and holder["held"][-1] > MOST * excess:
            return carried_sentence(holder)
    if attention.get("unfused"):
        scores = sum(site.bytes for site in now.sites if "softmax" in (site.operator or "").lower())
        if scores > MOST * excess:
            return unfused_sentence(attention)
    return ""


def leak_cause(sites: Sequence[Site]) -> str:
    """Return the sentence on the variable that keeps most of a test's leak; empty if unknown."""
    held, graphs, containers = Counter[str](), Counter[str](), Counter[str]()
    for site in sites:
        if site.held_by:
            name = site.held_by.removeprefix(GRAPH_OF)
            held[name] += site.bytes
            containers[name.partition("[")[0]] += site.bytes
            graphs[name] += site.bytes if name != site.held_by else 0
    total = sum(site.bytes for site in sites)
    for found in (held, containers):
        for name, nbytes in found.most_common(1):
            if nbytes > MOST * total:
                share = graphs[name] if found is held else graphs.total()
                mostly = ", most of it by the graph of what it holds" * (share > MOST * nbytes)
                return f"{name} keeps {format_size(nbytes)} after the test{mostly}"
    return ""


def _changed_dtype(growth: Growth) -> Evidence:
    gains: defaultdict[tuple[str, str], list[tuple[int, Site]]] = defaultdict(list)
    kinds = [_by_kind(side.sites) for side in (growth.now, growth.before)]
    for kind, (now, site) in kinds[0].items():
        was = kinds[1].get(kind)
        if was and now.keys().isdisjoint(was[0]) and len(now) == len(was[0]) == 1:
            (dtype, nbytes), (before, known) = *now.items(), *was[0].items()
            gains[before, dtype].append((nbytes - known, site))
    for (before, dtype), found in gains.items():
        found.sort(key=lambda pair: -pair[0])
        same = _same_tensors([site for _, site in found])
        new = [
            change
            for change in growth.changes
            if (change.change, change.site.dtype, change.site.operator) == ("new", dtype, CAST)
        ]
        cast = max(new, key=lambda change: change.bytes, default=None)
        at = f"; new is the cast at {cast.site.site}" if cast else ""
        yield sum(gain for gain, _ in found), f"{same}: {before} before, {dtype} now{at}"


def _parameters_dtype(growth: Growth) -> Evidence:
    """Detect another dtype of parameters by the facts, as a real GPU's history has no dtypes."""
    now, before = growth.facts("models")
    own = growth.gained(PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
    for name, model in now.items():
        dtype, was = model.get("dtype"), before.get(name, {}).get("dtype")
        if dtype and was and dtype != was:
            yield own, f"the parameters of {name}: {was} before, {dtype} now"


def _by_kind(sites: Iterable[Site]) -> dict[tuple[Any, ...], tuple[dict[str, int], Site]]:
    """Return the bytes of each kind of tensor by dtype, and the first site of the kind."""
    found: dict[tuple[Any, ...], tuple[dict[str, int], Site]] = {}
    for site in sites:
        if site.dtype is None or site.operator is None:
            continue
        owner = (site.module or "").partition(".*")[0]
        kind = site.category, site.function, owner, site.operator
        totals, _ = found.setdefault(kind, ({}, site))
        totals[site.dtype] = totals.get(site.dtype, 0) + site.bytes
    return found


def _same_tensors(sites: Sequence[Site]) -> str:
    words = (site.category if site.category != OTHER else "tensors" for site in sites)
    categories = list(dict.fromkeys(words))
    places = list(dict.fromkeys(site_text(site) for site in sites if site.site))
    if len(categories) > 2 or not places:
        return f"the same {listed(categories)}"
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"the same {listed(categories)} at {places[0]}{more}"


def _inputs(growth: Growth) -> Evidence:
    now, before = growth.facts("inputs")
    larger = [
        (shape, was)
        for shape, was in zip(now, before, strict=False)
        if len(shape) == len(was) and math.prod(shape) > math.prod(was)
    ]
    if larger and len(now) == len(before):
        shape, was = larger[0]
        gained = growth.gained(INPUTS, ACTIVATIONS, TEMPORARIES, OTHER)
        yield gained, f"the inputs are larger: {shape_text(was)} before, {shape_text(shape)} now"
    new = [one for one in growth.gains if one.site.category == INPUTS]
    where = ""
    for change in new[:1]:
        site, more = change.site, format_size(change.bytes)
        if site.shape and block_size(site) == change.bytes // site.count:  # all have one shape
            more = f"{site.count} × {shape_text(site.shape)}"
        where = f": {site_text(site)} holds {more} more"
    held = [side.categories[INPUTS] for side in (growth.now, growth.before)]
    sizes = f"{format_size(held[0])}, {format_size(held[1])} before"
    yield held[0] - held[1], f"the inputs hold {sizes}{where}"


def _larger_model(growth: Growth) -> Evidence:
    now, before = growth.facts("models")
    own = growth.gained(PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
    if growth.now.facts.get("inputs") == growth.before.facts.get("inputs"):
        # With equal inputs, memory that grew at the same sites grew with the model.
        own += sum(
            change.bytes
            for change in growth.changes
            if change.change == "grown" and change.site.category in (ACTIVATIONS, TEMPORARIES)
        )
    for name in (one for one in now if one in before):
        if now[name]["parameters"] <= before[name]["parameters"]:
            continue
        shapes, were = now[name]["largest"], before[name]["largest"]
        grown = [one for one in shapes if one in were and shapes[one] != were[one]]
        if grown:
            first = grown[0]
            more = f" (and {len(grown) - 1} more)" if len(grown) > 1 else ""
            change = f"{shape_text(were[first])} before, {shape_text(shapes[first])} now"
            shown = f"{first}{more}: {change}"
        else:
            shown = f"{before[name]['parameters']:,} before, {now[name]['parameters']:,} now"
        yield own, f"{name} has more parameters, {shown}"


def _largest_change(growth: Growth) -> Evidence:
    largest = largest_gain(growth)
    if largest is None:
        return
    site = largest.site
    held = "memory" if site.category == OTHER else site.category
    where = site_text(site) or site.module or "a place that is not known"
    size = format_size(largest.bytes)
    if largest.change != "new":
        yield growth.bytes, f"{where} takes {size} of {held} more"
        return
    count = f"{site.count} × " if site.count > 1 else ""
    shape = f"{count}{shape_text(site.shape)} " if site.shape else ""
    tensor = f" ({shape}{site.dtype})" if shape and site.dtype else ""
    if growth.bytes < MOST * largest.bytes:
        # Other tensors are gone from the peak, which may be at another moment.
        yield growth.bytes, f"the peak now includes {size} of {held} at {where}{tensor}"
        return
    verb = "were" if held.endswith("s") else "was"
    yield growth.bytes, f"{where} takes {size} of {held} that {verb} not there before{tensor}"


DETECTORS: tuple[Callable[[Growth], Evidence], ...] = (
    *PROGRAM_CAUSES,
    *(_inputs, _changed_dtype, _parameters_dtype, _larger_model),
    *(partial(variables, known=True), _largest_change),
)
"""The detectors in order: differences in the program's calls, then in its tensors. Of the latter,
detectors whose evidence is one tensor come before those that count all growth."""
