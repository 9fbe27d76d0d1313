"""Differences of two compositions."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import compact, explain

SOFTMAX = Site(
    "activations",
    4096,
    4,
    "model.py:14",
    "forward",
    "torch.softmax",
    "blocks.*.attn",
    (2, 512),
    "bfloat16",
)
LINEAR = replace(SOFTMAX, operator="torch.addmm", bytes=8192, site="model.py:20")
WEIGHT = Site("parameters", 1024, 2, "test.py:3", "test", "Tensor.to", "head", (16, 16), "float32")


def diff(actual: list[Site], reference: list[Site]) -> list[tuple[int, str, str | None]]:
    return [
        (change.bytes, change.change, change.site.operator) for change in explain(actual, reference)
    ]


def test_lines_that_moved_are_no_change() -> None:
    moved = [replace(SOFTMAX, site="model.py:99"), LINEAR, WEIGHT]
    assert diff(moved, [SOFTMAX, LINEAR, WEIGHT]) == []


def test_new_gone_grown_and_shrunk_sites_are_sorted_by_size() -> None:
    actual = [replace(SOFTMAX, bytes=8192, dtype="float32"), replace(WEIGHT, bytes=512)]
    cloned = replace(SOFTMAX, operator="torch.clone", bytes=2048)
    assert diff([*actual, cloned], [SOFTMAX, WEIGHT, LINEAR]) == [
        (-8192, "gone", "torch.addmm"),
        (4096, "grown", "torch.softmax"),
        (2048, "new", "torch.clone"),
        (-512, "shrunk", "Tensor.to"),
    ]


def test_more_blocks_of_the_same_size_are_counted() -> None:
    (change,) = explain([replace(SOFTMAX, bytes=6144, count=6)], [SOFTMAX])
    assert (change.bytes, change.site.count, change.change) == (2048, 2, "grown")


def test_added_blocks_of_one_size_are_recorded_with_that_size() -> None:
    # Three of 1536 bytes where one was: two more, of that size each.
    blocks = replace(SOFTMAX, bytes=4608, count=3, each=1536)
    (change,) = explain([blocks], [replace(blocks, bytes=1536, count=1)])
    assert (change.bytes, change.site.count) == (3072, 2)
    assert change.to_dict()["each"] == 1536


def test_a_line_added_between_two_of_the_same_operator_is_new() -> None:
    first, last = (
        replace(SOFTMAX, site="model.py:10"),
        replace(SOFTMAX, site="model.py:30", bytes=2),
    )
    middle = replace(SOFTMAX, site="model.py:20", bytes=512)
    moved = replace(last, site="model.py:31")
    (change,) = explain([first, middle, moved], [first, last])
    assert (change.bytes, change.change, change.site.site) == (512, "new", "model.py:20")


def test_a_tensor_that_is_kept_for_backward_now_is_the_same_tensor() -> None:
    kept = replace(SOFTMAX, bytes=16384, count=16)
    before = replace(SOFTMAX, category="temporaries")
    (change,) = explain([kept], [before])
    assert (change.bytes, change.change, change.site.category) == (12288, "grown", "activations")


def test_changes_sum_to_the_whole_difference() -> None:
    actual, reference = [SOFTMAX, WEIGHT], [LINEAR, replace(WEIGHT, category="gradients")]
    total = sum(site.bytes for site in actual) - sum(site.bytes for site in reference)
    assert sum(change.bytes for change in explain(actual, reference)) == total


def many(count: int) -> list[Site]:
    return [replace(SOFTMAX, operator=f"op{n}", bytes=10_000 - n) for n in range(count)]


def test_a_compacted_composition_keeps_its_bytes() -> None:
    kept = compact(many(30), most=20)
    assert len(kept) == 21
    assert sum(site.bytes for site in kept) == sum(site.bytes for site in many(30))
    rest = Site("activations", sum(10_000 - n for n in range(20, 30)), 40, "model.py:14", "forward")
    assert kept[-1] == rest


def test_a_compacted_composition_does_not_differ_from_itself() -> None:
    # Two sites of one operator, of which one is in the compacted rest.
    twice = [*many(40), *(replace(site, site="model.py:50", bytes=10) for site in many(40))]
    assert diff(twice, list(compact(twice))) == []


def test_a_new_site_stands_out_of_a_compacted_reference() -> None:
    new = replace(WEIGHT, operator="torch.ones", bytes=50_000)
    assert diff([*many(40), new], list(compact(many(40)))) == [(50_000, "new", "torch.ones")]


def test_growth_in_the_compacted_rest_names_its_function() -> None:
    grown = [
        replace(site, bytes=site.bytes + 4) if site.bytes < 9_965 else site for site in many(40)
    ]
    (change,) = explain(grown, compact(many(40)))
    assert (change.bytes, change.change) == (16, "grown")
    assert (change.site.function, change.site.category) == ("forward", "activations")


def test_a_renamed_function_is_the_same_function() -> None:
    assert diff([replace(SOFTMAX, function="attend", module=None), WEIGHT], [SOFTMAX, WEIGHT]) == []


def test_the_rest_of_a_renamed_function_is_the_same_rest() -> None:
    renamed = [replace(site, function="attend") for site in many(40)]
    assert diff(renamed, list(compact(many(40)))) == []
