"""Causes in a program's calls and settings: detectors that compare the facts of two runs.

Each yields sentences with the bytes that they explain, if the facts differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import (
    MOST,
    Change,
    Facts,
    Growth,
    Side,
    largest_gain,
    names_text,
    site_text,
)
from pytest_gpumem.attribution.history import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted, listed
from pytest_gpumem.values.operator_names import FUSED

Evidence = Iterator[tuple[int, str]]
"""Explained bytes and the sentence on them; the sentence is empty if it is not certain."""


def _compiled(growth: Growth) -> Evidence:
    fused = {
        _base(name)
        for site in growth.before.sites
        if site.operator and site.operator.endswith(FUSED)
        for name in site.operator.removesuffix(FUSED).split(" + ")
    }
    eager = [one for one in growth.gains if _base(one.site.operator or "") in fused]
    if eager:
        first = max(eager, key=lambda change: change.bytes)
        yield (
            sum(change.bytes for change in eager),
            f"{site_text(first.site)} ran eagerly and took {format_size(first.bytes)}; compiled "
            "code computed it before",
        )


def _base(operator: str) -> str:
    """Return ``cos`` of ``torch.cos``, ``aten::cos`` and of the node ``CosBackward0``."""
    if operator.endswith(FUSED):
        return ""
    name = re.sub(r"Backward\d*$", "", re.split(r"[.:]", operator)[-1])
    return name.removesuffix("_backward").lower()


def _gained(growth: Growth, category: str, cause: str, more: str) -> tuple[int, str]:
    """Return the evidence of ``cause``: the growth of ``category``."""
    nbytes = growth.gained(category)
    return nbytes, f"{cause}: {format_size(nbytes)} of {category} {more}"


def _grad_mode(growth: Growth) -> Evidence:
    now, before = growth.facts("grad")
    lost = before.get("off", 0) - now.get("off", 0)
    if lost > 0 and now.get("on", 0) > before.get("on", 0):
        where = f"{counted(lost, 'forward')} where it was off (no_grad or inference_mode is gone)"
        yield _gained(growth, ACTIVATIONS, f"autograd is on in {where}", "are kept for backward")


def _checkpointing(growth: Growth) -> Evidence:
    now, before = growth.facts("recomputed")
    lost = set(before) - set(now)
    if growth.compares_facts and lost:
        yield (
            growth.gained(ACTIVATIONS),
            f"activations of {names_text(lost)} are kept for backward now; before they were "
            "computed again there (checkpointing is gone)",
        )


def _graphs(growth: Growth) -> Evidence:
    if not growth.compares_facts:
        return
    more = "more at the peak"
    now, before = growth.facts("retain_graph")
    if now and not before:
        kept = "backward(retain_graph=True) keeps the graph of a step while the next one runs"
        yield _gained(growth, ACTIVATIONS, kept, more)
    now, before = (count or 1 for count in growth.facts("graphs"))
    if now > before:
        waiting = f"the graphs of {now} forwards wait for one backward, {before} before"
        yield _gained(growth, ACTIVATIONS, waiting, more)


def _zeroed_gradients(growth: Growth) -> Evidence:
    now, before = growth.facts("zeroed_gradients")
    if growth.compares_facts and now and not before:
        filled = (
            "zero_grad(set_to_none=False) fills gradients with zeros where it freed them before"
        )
        yield _gained(growth, GRADIENTS, filled, "are there during the next forward")


def variables(growth: Growth, *, known: bool) -> Evidence:
    """Detect variables that hold memory of earlier steps; ``known``: those that did before, too."""
    if not growth.compares_facts:
        return
    facts = growth.facts("carried")
    now, before = (
        {(one["holder"], one["where"]): one for one in carried.get("holders", ())}
        for carried in facts
    )
    gains = {}
    for variable, holder in now.items():
        held, were = holder["held"], before.get(variable, {}).get("held", [0])
        # A variable of earlier runs whose steps add bytes only now has a new role.
        is_known = variable in before and bool(steady_step(held)) == bool(steady_step(were))
        if is_known == known:
            gains[variable] = held[-1] - were[-1]
    for variable in sorted(gains, key=lambda one: -gains[one]):
        sentence = carried_sentence(now[variable])
        if known and sentence:
            were = before[variable]["held"]
            sentence += f"; {format_size(steady_step(were) or were[-1])} before"
        until_the_end = gains[variable] + _later_steps(facts[0], now[variable]["held"])
        yield gains[variable], sentence
        if MOST * until_the_end < growth.bytes:
            yield until_the_end, sentence


def _carried(growth: Growth) -> Evidence:
    if not growth.compares_facts:
        return
    yield from variables(growth, known=False)
    facts = growth.facts("carried")
    # Memory of each step that no variable holds, but for example the consumer of a generator.
    amounts = facts[0].get("bytes", ())
    step, left = steady_step(amounts), largest_gain(growth)
    if step and not steady_step(facts[1].get("bytes", ())) and left and left.site.site:
        held = _later_steps(facts[0], amounts) + amounts[-1]
        if MOST * held <= growth.bytes:
            yield (
                min(held, left.bytes),
                f"each step leaves {format_size(step)} of {site_text(left.site)}; "
                "no variable of the running functions holds it",
            )


def _later_steps(carried: Facts, amounts: Sequence[int]) -> int:
    """Return the bytes added after the last inspection, if steps continued as before."""
    later: int = max(carried.get("forwards", 0) - len(amounts) - 1, 0)
    return steady_step(amounts) * later


def carried_sentence(holder: Facts) -> str:
    """Return the sentence on the bytes that each step leaves, or earlier steps left, in a variable.

    Empty if that is not certain: a batch may belong to a later step.
    """
    amounts: Sequence[int] = holder["held"]
    kind = f"the {holder['kind']} " if holder["kind"] else ""
    name = f"{kind}{holder['holder']} of {holder['where']}"
    step = steady_step(amounts)
    mostly_graph = holder["graph"] > MOST * amounts[-1]
    if step and mostly_graph:
        return f"each step leaves its graph ({format_size(step)} a step), held by {name}"
    if step:
        return f"each step leaves {format_size(step)} in {name}"
    if holder["batches"]:
        return ""
    graph = ", most of it by the graph that computed it" if mostly_graph else ""
    return f"{name} still holds {format_size(amounts[-1])} of earlier steps{graph}"


def steady_step(amounts: Sequence[int]) -> int:
    """Return the bytes that each step adds to ``amounts``; 0 unless the last two added some.

    With one growth only, it could be memory that each step keeps for the next one.
    """
    steps = [after - before for before, after in pairwise([0, *amounts])][-2:]
    return steps[-1] if len(steps) == 2 and min(steps) > 0 else 0


def _optimizer_state(growth: Growth) -> Evidence:
    now, before = growth.facts("optimizers")
    kept, was = (
        " and ".join(
            f"{', '.join(one['state']) or 'nothing'} ({name})" for name, one in optimizers.items()
        )
        for optimizers in (now, before)
    )
    if kept and was and kept != was:
        cause = f"the optimizer keeps {kept}, where it kept {was}"
        yield _gained(growth, OPTIMIZER_STATE, cause, "more")


def _optimizer_kind(growth: Growth) -> Evidence:
    now, before = growth.facts("optimizers")
    for name, one in now.items():
        was = before.get(name, one)["kind"]
        if one["kind"] != was:
            cause = f"{name} steps as {one['kind']}, {was} before"
            yield _gained(growth, TEMPORARIES, cause, "in its step")


def _copied_model(growth: Growth) -> Evidence:
    now, before = growth.facts("models")
    grown = any(name in before and now[name] != before[name] for name in now)
    copied = _second_parameters(growth) or _clones(growth)
    if before and not grown and copied is not None:
        where = f", made at {site_text(copied.site)}" if copied.site.site else ""
        more = f"{format_size(copied.bytes)} more{where}"
        yield copied.bytes, f"the parameters are there a second time: {more}"


def _second_parameters(growth: Growth) -> Change | None:
    """Return the growth by a copy of a module: as many parameters again, of the same size."""
    now, before = (_parameters_of(side) for side in (growth.now, growth.before))
    new = [one for one in growth.gains if one.site.category == PARAMETERS]
    if not new or now < 2 * before:
        return None
    first = max(new, key=lambda change: change.bytes)
    return replace(first, bytes=growth.gained(PARAMETERS))


def _clones(growth: Growth) -> Change | None:
    """Return a line that made a tensor for each parameter, of its dtype or as float32 of a half
    precision one: in a real GPU's history, copies cannot be distinguished from activations."""
    blocks, held = _parameters_of(growth.now), growth.now.categories[PARAMETERS]
    for change in growth.changes:
        made = change.change == "new" and change.site.category in (OTHER, ACTIVATIONS)
        if made and blocks > 1 and change.site.count == blocks and change.bytes in (held, 2 * held):
            return change
    return None


def _parameters_of(side: Side) -> int:
    return sum(site.count for site in side.sites if site.category == PARAMETERS)


def _trained(growth: Growth) -> Evidence:
    now, before = growth.facts("models")
    gained = {word: growth.gained(word) for word in (GRADIENTS, OPTIMIZER_STATE)}
    sizes = [f"{format_size(size)} of {word}" for word, size in gained.items() if size > 0]
    for name, model in now.items():
        old, trained = before.get(name, model), model.get("trained", 0)
        was = old.get("trained", trained)
        # A larger model trains more parameters, too, but has no fewer that are frozen.
        if sizes and trained > was and model["parameters"] - trained < old["parameters"] - was:
            yield (
                sum(gained.values()),
                f"{trained:,} parameters of {name} are trained now, {was:,} before "
                f"(requires_grad): {listed(sizes)} more",
            )


def _sharding(growth: Growth) -> Evidence:
    now, before = growth.facts("models")
    for name in now:
        units, were = (set(side.get(name, {}).get("sharded", ())) for side in (now, before))
        if lost := were - units:
            gathers = f"unsharded parameters of {names_text(units)} are gathered at once"
            whole = gathers if units else f"{name} is not sharded"
            before_it = f"before, {names_text(lost)} had units of their own"
            yield growth.gained(PARAMETERS, OTHER), f"{whole}; {before_it}"


def _attention(growth: Growth) -> Evidence:
    now, before = growth.facts("attention")
    if not before.get("fused"):
        return
    if now.get("unfused", 0) > before.get("unfused", 0):
        gained = growth.gained(ACTIVATIONS, TEMPORARIES)
        yield gained, f"{unfused_sentence(now)}, where it ran a fused kernel before"
    softmax = [one for one in growth.gains if "softmax" in (one.site.operator or "").lower()]
    if softmax and now.get("fused", 0) < before["fused"] and not now.get("unfused"):
        lines = {one.site.site for one in softmax} - {None}
        formula = [one for one in growth.gains if one in softmax or one.site.site in lines]
        total = sum(change.bytes for change in formula)
        first = max(softmax, key=lambda change: (change.site.category == ACTIVATIONS, change.bytes))
        if growth.compares_facts:
            yield (
                total,
                f"scaled_dot_product_attention is no longer called: the formula at "
                f"{site_text(first.site)} takes {format_size(total)} that the fused kernel does "
                "not need",
            )


def unfused_sentence(attention: Facts) -> str:
    """Return the sentence that attention ran unfused, with the reason."""
    why = ", ".join(attention.get("why", ()))
    return f"scaled_dot_product_attention ran unfused, as {why}"


def _layout(growth: Growth) -> Evidence:
    now, before = growth.facts("layouts")
    changed = ("contiguous", "channels_last")
    lost = {path for path in now if (now[path], before.get(path)) == changed}
    copies = largest_gain(growth)
    if lost and copies is not None:
        yield (
            copies.bytes,
            f"{names_text(lost)} got contiguous images where they were channels_last: "
            f"{site_text(copies.site)} takes {format_size(copies.bytes)} more",
        )


def _library(growth: Growth) -> Evidence:
    now, before = growth.facts("libraries")
    for name, release in now.items():
        was = before.get(name, release)
        own = [one for one in growth.changes if _package(one.site) == name]
        if was != release and own:
            gained = sum(one.bytes for one in own)
            first = max(own, key=lambda one: one.bytes)
            yield (
                gained,
                f"{name} is {release} now, {was} before, and takes {format_size(gained)} more: "
                f"{site_text(first.site)}",
            )


def _package(site: Site) -> str:
    return (site.site or "").rpartition(":")[0].partition("/")[0].removesuffix(".py")


PROGRAM_CAUSES = (
    *(_compiled, _grad_mode, _checkpointing, _graphs, _zeroed_gradients, _carried, _sharding),
    *(_copied_model, _trained, _optimizer_state, _optimizer_kind, _attention, _layout, _library),
)
"""The detectors in the order in which they run."""
