"""A cause is named where its evidence explains most of the difference, and never guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpumem.attribution.causes import absolute_cause, cause_of, leak_cause
from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import Growth, Side, explain
from pytest_gpumem.attribution.program_causes import carried_sentence

MIB = 1 << 20

WEIGHT = Site("parameters", 4 * MIB, 2, "t.py:3", "test", "Tensor.to", "head", (8, 8), "float32")
KEPT = Site("activations", 8 * MIB, 1, "m.py:7", "forward", "torch.mul", "net", (4, 4), "float32")
OUTSIDE = Site("other", 64 * MIB, 1, "t.py:9", "test", "torch.zeros", None, (16,), "float32")


def growth(
    now: list[Site], before: list[Site], facts: dict[str, Any], were: dict[str, Any]
) -> Growth:
    return Growth(Side(now, facts), Side(before, were), explain(now, before))


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grad mode": ({"grad": {"on": 3}}, {"grad": {"off": 3}}, "autograd is on in 3 forwards"),
    "checkpointing": (
        {"grad": {"on": 1}},
        {"grad": {"on": 1}, "recomputed": ["blocks.*"]},
        "activations of blocks.* are kept for backward now",
    ),
    "retained graph": (
        {"grad": {"on": 1}, "retain_graph": 3},
        {"grad": {"on": 1}},
        "backward(retain_graph=True) keeps the graph",
    ),
    "waiting graphs": (
        {"grad": {"on": 3}, "graphs": 3},
        {"grad": {"on": 3}},
        "the graphs of 3 forwards wait for one backward, 1 before",
    ),
    "inputs": ({"inputs": [[8, 4]]}, {"inputs": [[4, 4]]}, "the inputs are larger: (4, 4) before"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_fact_is_the_cause_where_activations_grew(name: str) -> None:
    facts, were, sentence = CHANGED[name]
    assert cause_of(growth([WEIGHT, KEPT], [WEIGHT], facts, were)).startswith(sentence)


@pytest.mark.parametrize("name", CHANGED)
def test_the_cause_is_the_tensor_that_grew_most(name: str) -> None:
    """8 MiB of activations beside 128 MiB of a tensor that the test itself has made."""
    facts, were, _ = CHANGED[name]
    outside = replace(OUTSIDE, category="gradients", bytes=128 * MIB)
    assert cause_of(growth([WEIGHT, KEPT, outside], [WEIGHT], facts, were)) == (
        "t.py:9 (torch.zeros) takes 128.0 MiB of gradients that were not there before "
        "((16) float32)"
    )


@pytest.mark.parametrize("name", CHANGED)
def test_no_cause_is_named_without_facts_of_both_runs(name: str) -> None:
    facts, _, _ = CHANGED[name]
    assert cause_of(growth([WEIGHT, KEPT], [WEIGHT], facts, {})).startswith("m.py:7 (torch.mul)")


def test_another_dtype_is_the_cause_only_for_the_same_tensors() -> None:
    half = replace(KEPT, bytes=4 * MIB, dtype="bfloat16")
    assert cause_of(growth([KEPT], [half], {}, {})) == (
        "the same activations at m.py:7 (torch.mul): bfloat16 before, float32 now"
    )
    moved = replace(half, operator="torch.add")
    assert "before, float32 now" not in cause_of(growth([KEPT], [moved], {}, {}))


def test_no_cause_is_named_without_growth() -> None:
    assert cause_of(growth([WEIGHT], [WEIGHT, KEPT], {}, {})) == ""


def left(nbytes: int, held_by: str | None) -> Site:
    return replace(OUTSIDE, bytes=nbytes, held_by=held_by)


@pytest.mark.parametrize(
    ("sites", "sentence"),
    [
        ([left(MIB, "net.KEPT[0]")], "net.KEPT[0] keeps 1.0 MiB after the test"),
        (
            [left(3 * MIB, "the graph of net.LOSS"), left(512, "net.LOSS")],
            "net.LOSS keeps 3.0 MiB after the test, most of it by the graph of what it holds",
        ),
        (
            [left(MIB, f"net.KEPT[{index}]") for index in range(4)],
            "net.KEPT keeps 4.0 MiB after the test",
        ),
        ([left(MIB, None), left(1024, "net.KEPT[0]")], ""),
        ([], ""),
    ],
)
def test_the_variable_that_keeps_most_of_a_leak_is_named(sites: list[Site], sentence: str) -> None:
    assert leak_cause(sites) == sentence


LOSSES = {
    "holder": "losses",
    "where": "train()",
    "kind": "list",
    "held": [4 * MIB, 8 * MIB],
    "graph": 7 * MIB,
    "batches": False,
}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "each step leaves its graph (4.0 MiB a step), held by the list losses of train()"),
        ({"graph": 0}, "each step leaves 4.0 MiB in the list losses of train()"),
        (
            {"held": [8 * MIB, 8 * MIB]},
            "the list losses of train() still holds 8.0 MiB of earlier steps, most of it by the "
            "graph that computed it",
        ),
        (
            {"held": [0, 8 * MIB], "graph": 0},
            "the list losses of train() still holds 8.0 MiB of earlier steps",
        ),
        ({"held": [8 * MIB, 8 * MIB], "batches": True}, ""),
    ],
)
def test_memory_that_steps_leave_is_described(changed: dict[str, Any], sentence: str) -> None:
    assert carried_sentence({**LOSSES, **changed}) == sentence


def test_memory_that_no_variable_holds_is_named_by_its_line() -> None:
    """Three outputs of 8 MiB that the consumer of a generator keeps."""
    carried = {"bytes": [8 * MIB, 16 * MIB, 24 * MIB], "forwards": 4, "holders": []}
    now, before = {"grad": {"off": 4}, "carried": carried}, {"grad": {"off": 4}}
    kept = replace(KEPT, bytes=24 * MIB, count=3)
    assert cause_of(growth([WEIGHT, kept], [WEIGHT], now, before)) == (
        "each step leaves 8.0 MiB of m.py:7 (torch.mul); no variable of the running functions "
        "holds it"
    )
    assert "each step" not in cause_of(growth([WEIGHT, kept], [WEIGHT], now, now))


def test_dtypes_are_those_of_parameters_where_none_are_recorded() -> None:
    now, before = (
        dict[str, Any](models={"net": {"parameters": 9, "dtype": dtype, "largest": {}}})
        for dtype in ("float32", "bfloat16")
    )
    wide, half = replace(WEIGHT, dtype=None), replace(WEIGHT, dtype=None, bytes=2 * MIB)
    assert cause_of(growth([wide], [half], now, before)) == (
        "the parameters of net: bfloat16 before, float32 now"
    )
    outside = replace(OUTSIDE, dtype=None)
    assert "bfloat16" not in cause_of(growth([wide, outside], [half], now, before))


def test_a_new_cast_is_named_with_the_dtype_that_results() -> None:
    half = replace(KEPT, bytes=4 * MIB, dtype="bfloat16")
    cast = replace(KEPT, bytes=MIB, site="m.py:5", operator="Tensor.to")
    assert cause_of(growth([KEPT, cast], [half], {}, {})) == (
        "the same activations at m.py:7 (torch.mul): bfloat16 before, float32 now; new is the "
        "cast at m.py:5"
    )


def test_the_variable_that_holds_more_than_before_is_the_cause() -> None:
    """Two variables keep equal bytes; one of them kept them before, too."""
    running = {**LOSSES, "holder": "running", "kind": "", "graph": 0, "held": [MIB, MIB]}
    kept = {**running, "holder": "loss"}
    now = {"grad": {"on": 1}, "carried": {"holders": [kept, running]}}
    before = {"grad": {"on": 1}, "carried": {"holders": [kept]}}
    grown = replace(KEPT, bytes=9 * MIB)
    assert cause_of(growth([grown], [KEPT], now, before)) == (
        "running of train() still holds 1.0 MiB of earlier steps"
    )


def test_a_variable_that_held_as_many_tensors_before_is_no_cause_of_a_larger_dtype() -> None:
    """A variable keeps the last output until the next step, with and without autocast."""
    were = {**LOSSES, "holder": "logits", "kind": "", "graph": 0, "held": [4 * MIB, 4 * MIB]}
    held = {**were, "held": [8 * MIB, 8 * MIB]}
    now, before = ({"carried": {"holders": [one]}} for one in (held, were))
    half = replace(KEPT, bytes=4 * MIB, dtype="bfloat16")
    assert cause_of(growth([KEPT], [half], now, before)) == (
        "the same activations at m.py:7 (torch.mul): bfloat16 before, float32 now"
    )
    small = replace(KEPT, bytes=4 * MIB)
    assert cause_of(growth([KEPT], [small], now, before)) == (
        "logits of train() still holds 8.0 MiB of earlier steps; 4.0 MiB before"
    )


def test_a_tensor_of_another_moment_is_not_said_to_be_larger_than_the_growth() -> None:
    """The peak moves from one tensor to another, which was there before, but not at the peak."""
    moved = replace(OUTSIDE, bytes=OUTSIDE.bytes + 4096)
    other = replace(OUTSIDE, site="t.py:4", operator="torch.ones")
    assert cause_of(growth([moved], [other], {}, {})) == (
        "the peak now includes 64.0 MiB of memory at t.py:9 (torch.zeros) ((16) float32)"
    )


def test_parameters_of_a_larger_dtype_are_not_a_second_copy() -> None:
    """A bfloat16 model that is float32 now has as many parameters as before."""
    models = {"models": {"net": {"parameters": 2, "largest": {}}}}
    half = replace(WEIGHT, bytes=2 * MIB, dtype="bfloat16")
    assert cause_of(growth([WEIGHT], [half], models, models)).endswith(
        "bfloat16 before, float32 now"
    )
    second = replace(WEIGHT, site="ema.py:2", module="average")
    told = cause_of(growth([WEIGHT, second], [WEIGHT], models, models))
    assert told == (
        "the parameters are there a second time: 4.0 MiB more, made at ema.py:2 (Tensor.to)"
    )
    clones = replace(WEIGHT, category="other", operator="torch.clone", module=None)
    assert cause_of(growth([WEIGHT, clones], [WEIGHT], models, models)).startswith(
        "the parameters are"
    )


def test_parameters_that_are_trained_now_are_the_cause() -> None:
    now, before = (
        dict[str, Any](models={"net": {"parameters": 9, "trained": count, "largest": {}}})
        for count in (9, 1)
    )
    gradients = replace(WEIGHT, category="gradients")
    assert cause_of(growth([WEIGHT, gradients], [WEIGHT], now, before)) == (
        "9 parameters of net are trained now, 1 before (requires_grad): 4.0 MiB of gradients more"
    )
    assert "trained" not in cause_of(growth([WEIGHT, OUTSIDE], [WEIGHT], now, before))


def test_parameters_that_a_larger_model_has_are_not_said_to_be_frozen_before() -> None:
    now, before = (
        dict[str, Any](models={"net": {"parameters": count, "trained": count, "largest": {}}})
        for count in (9, 6)
    )
    gradients = replace(WEIGHT, category="gradients")
    assert cause_of(growth([WEIGHT, gradients], [], now, before)) == (
        "net has more parameters, 6 before, 9 now"
    )


def test_only_most_of_the_peak_over_a_limit_is_a_cause() -> None:
    side = Side([KEPT], {"carried": {"holders": [LOSSES]}})
    assert absolute_cause(side, 12 * MIB) == (
        "each step leaves its graph (4.0 MiB a step), held by the list losses of train()"
    )
    assert absolute_cause(side, 64 * MIB) == ""
    assert absolute_cause(Side([KEPT]), MIB) == ""
