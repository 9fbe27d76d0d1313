"""Workspaces and reserves of recurrent layers, as an H100 with cuDNN 9.19 took them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.simulated.operators.cudnn_rnn import Recurrent, reserve_bytes, workspace_bytes

_Sizes = tuple[int, int, int, int, int, int, int, int]

RECORDED: list[tuple[str, int | str, _Sizes, str, int, int, int]] = [
    # Kind and type; input, hidden, projected, layers, directions, batch, steps, rows; flags;
    # workspaces of inference and of training, reserve.
    ("gru", 4, (100, 1024, 0, 1, 1, 1, 5, 5), "", 22_305_024, 22_307_040, 123_136),
    ("gru", "bf16", (512, 8, 0, 1, 1, 64, 20, 1280), "", 9_812_096, 12_413_056, 123_136),
    ("gru", "bf16", (32, 100, 0, 2, 1, 1, 257, 257), "d", 17_200_224, 17_251_648, 671_712),
    ("gru", 2, (32, 512, 0, 1, 1, 1, 100, 100), "p", 10_370_304, 10_370_304, 614_656),
    ("gru", 2, (100, 128, 0, 2, 1, 16, 20, 320), "d", 18_556_800, 18_882_944, 1_070_336),
    ("gru", 2, (512, 256, 0, 2, 1, 64, 100, 6400), "d", 38_732_544, 45_810_432, 42_803_456),
    ("gru", "bf16", (512, 64, 0, 3, 2, 1, 100, 100), "", 51_330_592, 51_791_392, 512_256),
    ("gru", 2, (32, 128, 0, 1, 2, 4, 20, 80), "", 17_530_144, 17_539_360, 246_016),
    ("lstm", "bf16", (32, 512, 0, 1, 1, 1, 257, 257), "", 11_955_552, 11_955_552, 1_316_096),
    ("lstm", 2, (256, 8, 0, 1, 1, 1, 100, 100), "", 8_490_784, 8_583_712, 8_256),
    ("lstm", 2, (512, 64, 0, 1, 1, 16, 20, 320), "", 9_888_128, 10_305_920, 205_056),
    ("lstm", 4, (8, 100, 0, 2, 1, 16, 100, 1600), "d", 30_864_000, 31_504_000, 7_060_256),
    ("lstm", 4, (512, 64, 0, 1, 1, 128, 1, 128), "p", 9_306_368, 9_371_904, 164_096),
    ("lstm", "bf16", (512, 8, 4, 3, 1, 64, 257, 16448), "", 43_514_560, 76_315_840, 5_658_368),
    (
        "lstm",
        "bf16",
        (8, 256, 4, 3, 2, 128, 257, 32896),
        "d",
        291_288_320,
        291_288_320,
        675_420_928,
    ),
    ("lstm", 2, (256, 128, 0, 1, 2, 128, 257, 32896), "", 287_638_784, 287_638_784, 84_214_016),
    ("lstm", 2, (256, 100, 0, 2, 2, 64, 257, 10400), "p", 59_973_888, 64_479_488, 45_760_256),
    ("rnn_tanh", 2, (100, 64, 0, 1, 1, 128, 257, 32896), "", 40_319_744, 78_775_040, 4_210_944),
    ("rnn_tanh", "bf16", (32, 256, 0, 2, 1, 64, 20, 1280), "", 18_776_832, 20_169_472, 1_966_336),
    ("rnn_tanh", 4, (32, 256, 0, 3, 1, 16, 1, 16), "d", 26_806_656, 27_038_080, 83_200),
    (
        "rnn_tanh",
        "bf16",
        (256, 100, 0, 1, 2, 128, 257, 32896),
        "",
        86_653_248,
        157_811_008,
        13_158_656,
    ),
    ("rnn_tanh", 2, (256, 256, 0, 3, 1, 16, 100, 1240), "p", 26_611_968, 26_874_112, 3_174_656),
]


def call(name: str, element: int | str, sizes: _Sizes, flags: str = "") -> Recurrent:
    """Return a call; ``element`` is bytes or bf16, ``flags`` are p for packed and d for dropout."""
    return Recurrent(
        name,
        *sizes,
        2 if isinstance(element, str) else element,
        is_bfloat16=element == "bf16",
        is_packed="p" in flags,
        has_dropout="d" in flags,
        is_training=True,
    )


@pytest.mark.parametrize(
    ("name", "element", "sizes", "flags", "inference", "training", "reserve"), RECORDED
)
def test_sizes_equal_those_recorded_on_an_h100(
    name: str,
    element: int | str,
    sizes: _Sizes,
    flags: str,
    inference: int,
    training: int,
    reserve: int,
) -> None:
    made = call(name, element, sizes, flags)
    assert workspace_bytes(replace(made, is_training=False)) == inference
    assert workspace_bytes(made) == training
    assert reserve_bytes(made) == reserve


@pytest.mark.parametrize(
    ("name", "sizes", "nbytes"),
    [
        ("gru", (128, 256, 0, 1, 1, 16, 32, 512), 12_272_000),
        ("lstm", (128, 256, 0, 1, 1, 16, 32, 512), 13_009_280),
        ("lstm", (128, 256, 0, 1, 2, 16, 32, 512), 27_918_720),
        ("lstm", (128, 256, 64, 1, 1, 16, 32, 512), 12_394_880),
        ("lstm", (128, 256, 0, 2, 1, 32, 16, 512), 23_986_688),
        ("rnn_tanh", (128, 256, 0, 1, 1, 16, 32, 512), 16_220_544),
    ],
)
def test_sizes_of_layers_outside_of_the_rules_data(name: str, sizes: _Sizes, nbytes: int) -> None:
    assert workspace_bytes(call(name, 4, sizes)) == nbytes


@pytest.mark.parametrize(("name", "nbytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_reserve_equals_that_of_pytorch_issue_2895(name: str, nbytes: int) -> None:
    # Four layers of 320, by cuDNN 6, which had no 256 bytes more: exactly this for 25,000 rows.
    made = call(name, 4, (320, 320, 0, 4, 1, 100, 250, 25_000))
    assert reserve_bytes(made) == nbytes + 256


def test_small_states_of_float64_have_no_kernels_of_their_own() -> None:
    made = call("lstm", 4, (8, 64, 0, 1, 1, 4, 10, 40))
    assert made.is_small
    assert not replace(made, element_bytes=8).is_small
    assert not replace(made, hidden=193).is_small


@pytest.mark.parametrize(
    ("element", "steps", "workspace"),
    [
        (4, 100, 15_753_504),
        (4, 256, 25_977_120),
        (4, 257, 26_042_656),
        (4, 1000, 74_735_904),
        ("bf16", 256, 10_894_624),
        ("bf16", 257, 10_896_672),
    ],
)
def test_lengths_of_states_that_are_small_in_float32(
    element: int | str, steps: int, workspace: int
) -> None:
    """One LSTM layer of 192 units; up to 256 steps use one kind of kernel."""
    sizes = (64, 192, 0, 1, 1, 4, steps, 4 * steps)
    assert workspace_bytes(replace(call("lstm", element, sizes), is_training=True)) == workspace
