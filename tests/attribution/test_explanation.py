"""The lines of an explanation: how sites are grouped, blocks counted and lines shortened."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import Change, block_size, explain
from pytest_gpumem.attribution.explanation import explanation_lines, folded

KIB = 1024


def line(nbytes: int, **changes: Any) -> dict[str, Any]:
    return {"bytes": nbytes, "change": "new", "category": "activations", "count": 1, **changes}


def state(name: str, module: str, nbytes: int) -> dict[str, Any]:
    return line(
        nbytes,
        category="optimizer state",
        operator=f"AdamW.{name}",
        module=module,
        site="train.py:12",
        each=nbytes,
        dtype="float32",
    )


def test_the_state_of_an_optimizer_is_one_line_with_sizes_on_request() -> None:
    states = [state(name, m, n * KIB) for name in ("exp_avg_sq", "exp_avg") for m, n in SIZES]
    assert explanation_lines(states) == [
        "  +14.0 KiB  optimizer state  train.py:12  AdamW.exp_avg, exp_avg_sq  "
        "6 blocks float32 (new)"
    ]
    every = explanation_lines(states, every=True)
    assert len(every) == 6
    assert every[0].split() == [
        *("+4.0", "KiB", "optimizer", "state", "train.py:12", "AdamW.exp_avg_sq"),
        *("1", "×", "4.0", "KiB", "float32", "(new)"),
    ]


SIZES = [("head", 4), ("body", 2), ("tail", 1)]


def test_blocks_of_lines_shown_as_one_are_added_up() -> None:
    at = {"site": "net.py:3", "operator": "torch.relu"}
    lines = [line(2 * KIB, count=2, each=KIB, **at), line(3 * KIB, count=3, each=KIB, **at)]
    assert folded(lines)[0]["count"] == 5
    assert folded(lines)[0]["each"] == KIB
    # Memory without a count is one block.
    whole = [line(KIB, count=None, each=KIB, **at), line(2 * KIB, count=2, each=KIB, **at)]
    assert folded(whole)[0]["count"] == 3


def test_sizes_of_a_source_line_are_one_line_growth_and_shrinking_two() -> None:
    place = {"site": "net.py:7", "operator": "torch.add"}
    lines = [
        line(4 * KIB, **place, dtype="float32", each=4 * KIB),
        line(2 * KIB, **place, dtype="bfloat16", each=2 * KIB),
        line(-KIB, **{**place, "change": "gone"}, each=KIB),
        line(KIB, site="net.py:8", operator="torch.add", each=KIB),
    ]
    assert explanation_lines(lines) == [
        "  +6.0 KiB  activations  net.py:7  torch.add  2 blocks (new)",
        "  -1.0 KiB  activations  net.py:7  torch.add  1 × 1.0 KiB (gone)",
        "  +1.0 KiB  activations  net.py:8  torch.add  1 × 1.0 KiB (new)",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"count": 4, "each": 2 * KIB}, "4 × 2.0 KiB (new)"),
        # Of 7 and 1 KiB: a mean of 4 KiB is the size of neither.
        ({"count": 2, "each": None}, "2 blocks (new)"),
        ({"count": 2, "each": None, "change": "grown"}, "in 2 blocks"),
        ({"count": 1, "each": None, "change": "grown"}, "in 1 block"),
        # Recorded by an earlier release.
        ({"count": 2}, "2 × 4.0 KiB (new)"),
        ({"count": 3}, "3 blocks (new)"),
    ],
)
def test_a_product_is_shown_only_where_it_is_the_bytes(changes: dict[str, Any], text: str) -> None:
    assert explanation_lines([line(8 * KIB, **changes)]) == [f"  +8.0 KiB  activations  {text}"]


def test_parameters_are_named_by_their_module() -> None:
    moved = line(
        KIB, category="parameters", site="t.py:3", operator="Tensor.to", module="blocks.*.fc"
    )
    assert explanation_lines([moved], signed=False) == [
        "  1.0 KiB  parameters  t.py:3  blocks.*.fc  1 × 1.0 KiB"
    ]


def test_a_narrow_terminal_keeps_the_last_fused_operators_whole() -> None:
    fused = "torch.native_layer_norm + Tensor.to + torch.addmm, fused"
    wide = line(KIB, site="package/models/attention.py:71", operator=fused, each=KIB)
    short = "native_layer_norm + Tensor.to + addmm, fused"
    for width, shown in ((140, fused), (110, short), (90, "… Tensor.to + addmm, fused")):
        (text,) = explanation_lines([wide], width=width)
        assert f"  {shown}  " in f"{text}  "
        assert len(text) <= width
    (text,) = explanation_lines([wide], width=80)
    assert "  … addmm, fused" in text


def test_a_narrow_terminal_drops_blocks_then_folders_not_operators() -> None:
    wide = line(
        KIB,
        site="package/models/attention.py:71",
        operator="torch._scaled_dot_product_flash_attention",
        dtype="bfloat16",
        each=KIB,
    )
    whole = (
        "  +1.0 KiB  activations  package/models/attention.py:71  "
        "torch._scaled_dot_product_flash_attention  1 × 1.0 KiB bfloat16 (new)"
    )
    assert explanation_lines([wide], width=140) == [whole]
    assert explanation_lines([wide], width=125) == [whole.replace("1 × 1.0 KiB ", "")]
    assert explanation_lines([wide], width=106) == [
        "  +1.0 KiB  activations  package/…/attention.py:71  _scaled_dot_product_flash_attention  "
        "bfloat16 (new)"
    ]
    assert explanation_lines([wide], width=95) == [
        "  +1.0 KiB  activations  package/models/attention.py:71  "
        "_scaled_dot_product_flash_attention",
        "            bfloat16 (new)",
    ]
    assert explanation_lines([wide], width=80) == [
        "  +1.0 KiB  activations  package/models/attention.py:71",
        "            _scaled_dot_product_flash_attention  bfloat16 (new)",
    ]
    for width in range(70, 140):
        assert max(map(len, explanation_lines([wide], width=width))) <= width


def test_lines_that_wrap_leave_room_for_fewer_lines() -> None:
    """A failure still fits on a screen."""
    name = "torch._scaled_dot_product_flash_attention"
    lines = [line(KIB, site=f"a.py:{number}", operator=name) for number in range(12)]
    assert len(explanation_lines(lines, width=200)) == 10 + 1
    shown = explanation_lines(lines, width=60)
    assert len(shown) == 5 * 2 + 1
    assert shown[-1] == "  +7.0 KiB in 7 smaller changes"


def test_the_size_of_a_stored_block_follows_from_its_shape() -> None:
    same = Site("inputs", 4 * 512, 4, shape=(16, 8), dtype="float32")
    assert block_size(same) == 512
    assert block_size(Site("inputs", 5 * 512, 4, shape=(16, 8), dtype="float32")) is None
    assert block_size(Site("inputs", 1024, 2, shape=(512,), dtype="bool")) == 512
    assert block_size(Site("inputs", 1024, 2)) is None
    assert block_size(Site("inputs", 1000, 1)) == 1000
    assert Change(-2048, "gone", same).to_dict()["each"] == 512
    (grown,) = explain([Site("inputs", 4096, 4, each=1024)], [Site("inputs", 2048, 4, each=512)])
    assert grown.to_dict()["each"] is None
