"""Causes in a program's calls and settings: detectors that compare the facts of two runs.

Each returns its sentence where the facts differ and account for most of the difference, else
``None``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    place,
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
from pytest_gpumem.text import listed
from pytest_gpumem.values.operator_names import FUSED


def _compiled(growth: Growth) -> str | None:
    fused = {name for site in growth.before.sites for name in _fused_operators(site)}
    eager = [
        change
        for change in growth.changes
        if change.bytes > 0 and _base(change.site.operator or "") in fused
    ]
    if not growth.is_most(sum(change.bytes for change in eager)):
        return None
    first = max(eager, key=lambda change: change.bytes)
    return (
        f"{place(first.site)} ran eagerly and took {format_size(first.bytes)}; compiled code "
        "computed it before"
    )


def _fused_operators(site: Site) -> set[str]:
    """Return the operators that compiled code computed into one buffer, as :func:`_base` has it."""
    operator = site.operator or ""
    if not operator.endswith(FUSED):
        return set()
    return {_base(name) for name in operator.removesuffix(FUSED).split(" + ")}


def _base(operator: str) -> str:
    """Return ``cos`` of ``torch.cos``, ``aten::cos`` and of the node ``CosBackward0``."""
    if operator.endswith(FUSED):
        return ""
    name = re.sub(r"Backward\d*$", "", re.split(r"[.:]", operator)[-1])
    return name.removesuffix("_backward").lower()


def _grad_mode(growth: Growth) -> str | None:
    now, before = (side.fact("grad") or {} for side in (growth.now, growth.before))
    lost = before.get("off", 0) - now.get("off", 0)
    if not before or lost <= 0 or now.get("on", 0) <= before.get("on", 0):
        return None
    gained = growth.gained(ACTIVATIONS)
    if not growth.is_most(gained):
        return None
    forwards = f"{lost} forward{'s' * (lost > 1)}"
    return (
        f"autograd is on in {forwards} where it was off (no_grad or inference_mode is gone): "
        f"{format_size(gained)} of activations are kept for backward"
    )


def _checkpointing(growth: Growth) -> str | None:
    now, before = (set(side.fact("recomputed") or ()) for side in (growth.now, growth.before))
    lost = before - now
    gained = growth.gained(ACTIVATIONS)
    if not growth.compares_facts or not lost or not growth.is_most(gained):
        return None
    return (
        f"activations of {names_text(lost)} are kept for backward now; before they were computed "
        "again there (checkpointing is gone)"
    )


def _retained_graph(growth: Growth) -> str | None:
    if not growth.compares_facts or not growth.now.fact("retain_graph"):
        return None
    if growth.before.fact("retain_graph") or not growth.is_most(growth.gained(ACTIVATIONS)):
        return None
    return (
        "backward(retain_graph=True) keeps the graph of a step while the next one runs: "
        f"{format_size(growth.gained(ACTIVATIONS))} of activations more at the peak"
    )


def _waiting_graphs(growth: Growth) -> str | None:
    now, before = (side.fact("graphs") or 1 for side in (growth.now, growth.before))
    if not growth.compares_facts or now <= before or not growth.is_most(growth.gained(ACTIVATIONS)):
        return None
    return (
        f"the graphs of {now} forwards wait for one backward, {before} before: "
        f"{format_size(growth.gained(ACTIVATIONS))} of activations more at the peak"
    )


def _zeroed_gradients(growth: Growth) -> str | None:
    gained = growth.gained(GRADIENTS)
    new = growth.now.fact("zeroed_gradients") and not growth.before.fact("zeroed_gradients")
    if not growth.compares_facts or not new or not growth.is_most(gained):
        return None
    return (
        "zero_grad(set_to_none=False) fills gradients with zeros where it freed them before: "
        f"{format_size(gained)} of gradients are there during the next forward"
    )


def _carried(growth: Growth) -> str | None:
    carried = [side.fact("carried") or {} for side in (growth.now, growth.before)]
    now, before = map(_by_variable, carried)
    if not growth.compares_facts:
        return None
    gains = {
        variable: holder["held"][-1] - (before[variable]["held"][-1] if variable in before else 0)
        for variable, holder in now.items()
    }
    for variable in sorted(gains, key=lambda one: -gains[one]):
        holder, gain = now[variable], gains[variable]
        until_the_end = gain + _later_steps(carried[0], holder)
        found = growth.is_most(gain) or (
            growth.is_most(until_the_end) and MOST * until_the_end < growth.bytes
        )
        if found and (sentence := carried_sentence(holder)):
            return sentence
    return _carried_unseen(growth, *carried)


def _carried_unseen(growth: Growth, now: Facts, before: Facts) -> str | None:
    """Return what each step leaves where no variable holds it: a generator's consumer does."""
    amounts = now.get("bytes", ())
    step, left = steady_step(amounts), largest_gain(growth)
    if not step or steady_step(before.get("bytes", ())) or left is None or not left.site.site:
        return None
    held = _later_steps(now, {"held": amounts}) + amounts[-1]
    if not growth.is_most(held) or MOST * held > growth.bytes or not growth.is_most(left.bytes):
        return None
    return (
        f"each step leaves {format_size(step)} of {place(left.site)}; "
        "no variable of the running functions holds it"
    )


def _later_steps(carried: Facts, holder: Facts) -> int:
    """Return what ``holder`` gained after the last inspection, if its steps went on as before."""
    inspected = len(holder["held"]) + 1
    later: int = max(carried.get("forwards", 0) - inspected, 0)
    return steady_step(holder["held"]) * later


def _by_variable(carried: Facts) -> dict[tuple[str, str], Facts]:
    return {(one["holder"], one["where"]): one for one in carried.get("holders", ())}


def carried_sentence(holder: Facts) -> str:
    """Return what each step leaves in a variable, or that it keeps tensors of earlier steps.

    Empty where neither is certain: a batch may be of a step to come.
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

    Two are the least that tell a growth from what one step keeps for the next one.
    """
    steps = [after - before for before, after in pairwise([0, *amounts])][-2:]
    return steps[-1] if len(steps) == 2 and min(steps) > 0 else 0


def _optimizer_state(growth: Growth) -> str | None:
    now, before = (side.fact("optimizers") or {} for side in (growth.now, growth.before))
    states = [_states(now), _states(before)]
    gained = growth.gained(OPTIMIZER_STATE)
    if not now or not before or states[0] == states[1] or not growth.is_most(gained):
        return None
    return (
        f"the optimizer keeps {states[0]}, where it kept {states[1]}: "
        f"{format_size(gained)} of optimizer state more"
    )


def _states(optimizers: Facts) -> str:
    told = (f"{', '.join(one['state']) or 'nothing'} ({name})" for name, one in optimizers.items())
    return " and ".join(told)


def _optimizer_kind(growth: Growth) -> str | None:
    now, before = (side.fact("optimizers") or {} for side in (growth.now, growth.before))
    gained = growth.gained(TEMPORARIES)
    for name, one in now.items():
        was = before.get(name, one)["kind"]
        if one["kind"] != was and growth.is_most(gained):
            return (
                f"{name} steps as {one['kind']}, {was} before: "
                f"{format_size(gained)} of temporaries in its step"
            )
    return None


def _copied_model(growth: Growth) -> str | None:
    now, before = (side.fact("models") or {} for side in (growth.now, growth.before))
    grown = [name for name in now if name in before and now[name] != before[name]]
    if not before or grown:
        return None
    copied = _second_parameters(growth) or _clones(growth)
    if copied is None or not growth.is_most(copied.bytes):
        return None
    where = f", made at {place(copied.site)}" if copied.site.site else ""
    return f"the parameters are there a second time: {format_size(copied.bytes)} more{where}"


def _second_parameters(growth: Growth) -> Change | None:
    """Return what a copied module added: as many parameters again, not the same ones in more
    bytes."""
    now, before = (_blocks_of(side, PARAMETERS) for side in (growth.now, growth.before))
    new = [one for one in growth.changes if one.site.category == PARAMETERS and one.bytes > 0]
    if not new or now < 2 * before:
        return None
    first = max(new, key=lambda change: change.bytes)
    return replace(first, bytes=growth.gained(PARAMETERS))


def _clones(growth: Growth) -> Change | None:
    """Return a line that made a tensor of each parameter's size, in their dtype or in float32 of
    half of it; a GPU's record does not tell copies from activations."""
    blocks, held = _blocks_of(growth.now, PARAMETERS), growth.now.categories.get(PARAMETERS, 0)
    for change in growth.changes:
        made = change.change == "new" and change.site.category in (OTHER, ACTIVATIONS)
        if made and blocks > 1 and change.site.count == blocks and change.bytes in (held, 2 * held):
            return change
    return None


def _blocks_of(side: Side, category: str) -> int:
    return sum(site.count for site in side.sites if site.category == category)


def _trained(growth: Growth) -> str | None:
    now, before = (side.fact("models") or {} for side in (growth.now, growth.before))
    gradients, states = growth.gained(GRADIENTS), growth.gained(OPTIMIZER_STATE)
    for name, model in now.items():
        was = before.get(name, {}).get("trained")
        trained = model.get("trained")
        if was is None or trained is None or trained <= was:
            continue
        if growth.is_most(gradients + states):
            sizes = [
                f"{format_size(nbytes)} of {word}"
                for nbytes, word in ((gradients, GRADIENTS), (states, OPTIMIZER_STATE))
                if nbytes > 0
            ]
            return (
                f"{trained:,} parameters of {name} are trained now, {was:,} before "
                f"(requires_grad): {listed(sizes)} more"
            )
    return None


def _sharding(growth: Growth) -> str | None:
    now, before = (side.fact("models") or {} for side in (growth.now, growth.before))
    for name in now:
        units, were = (set(side.get(name, {}).get("sharded", ())) for side in (now, before))
        lost = were - units
        if lost and growth.is_most(growth.gained(PARAMETERS, OTHER)):
            gathers = f"unsharded parameters of {names_text(units)} are gathered at once"
            whole = gathers if units else f"{name} is not sharded"
            return f"{whole}; before, {names_text(lost)} had units of their own"
    return None


def _unfused_attention(growth: Growth) -> str | None:
    now, before = (side.fact("attention") or {} for side in (growth.now, growth.before))
    if not before.get("fused") or now.get("unfused", 0) <= before.get("unfused", 0):
        return None
    if not growth.is_most(growth.gained(ACTIVATIONS, TEMPORARIES)):
        return None
    return f"{unfused_sentence(now)}, where it ran a fused kernel before"


def unfused_sentence(attention: Facts) -> str:
    """Return that attention ran its unfused kernel, and why."""
    why = ", ".join(attention.get("why", ()))
    return f"scaled_dot_product_attention ran unfused, as {why}"


def _written_attention(growth: Growth) -> str | None:
    now, before = (side.fact("attention") or {} for side in (growth.now, growth.before))
    if not before.get("fused") or now.get("fused", 0) >= before["fused"] or now.get("unfused"):
        return None
    gains = [change for change in growth.changes if change.bytes > 0]
    softmax = [one for one in gains if "softmax" in (one.site.operator or "").lower()]
    lines = {one.site.site for one in softmax}
    formula = [one for one in gains if one in softmax or (one.site.site in lines and one.site.site)]
    total = sum(change.bytes for change in formula)
    if not growth.compares_facts or not softmax or not growth.is_most(total):
        return None
    first = max(softmax, key=lambda change: (change.site.category == ACTIVATIONS, change.bytes))
    return (
        f"scaled_dot_product_attention is no longer called: the formula at {place(first.site)} "
        f"takes {format_size(total)} that the fused kernel does not need"
    )


def _layout(growth: Growth) -> str | None:
    now, before = (side.fact("layouts") or {} for side in (growth.now, growth.before))
    lost = {
        path for path in now if (now[path], before.get(path)) == ("contiguous", "channels_last")
    }
    copies = largest_gain(growth)
    if not lost or copies is None or not growth.is_most(copies.bytes):
        return None
    return (
        f"{names_text(lost)} got contiguous images where they were channels_last: "
        f"{place(copies.site)} takes {format_size(copies.bytes)} more"
    )


def _library(growth: Growth) -> str | None:
    now, before = (side.fact("libraries") or {} for side in (growth.now, growth.before))
    for name, release in now.items():
        was = before.get(name, release)
        own = [one for one in growth.changes if _package(one.site) == name]
        gained = sum(one.bytes for one in own)
        if was != release and growth.is_most(gained):
            first = max(own, key=lambda one: one.bytes)
            return (
                f"{name} is {release} now, {was} before, and takes {format_size(gained)} more: "
                f"{place(first.site)}"
            )
    return None


def _package(site: Site) -> str:
    return (site.site or "").rpartition(":")[0].partition("/")[0].removesuffix(".py")


DEEDS = (
    _compiled,
    _grad_mode,
    _checkpointing,
    _retained_graph,
    _waiting_graphs,
    _zeroed_gradients,
    _carried,
    _sharding,
    _copied_model,
    _trained,
    _optimizer_state,
    _optimizer_kind,
    _unfused_attention,
    _written_attention,
    _layout,
    _library,
)
"""The detectors in the order in which they run."""
