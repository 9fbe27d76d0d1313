"""``gpumem layers``: a model layer by layer."""

from __future__ import annotations

import csv

import pytest

from tests.cli.targets import KIB, Command, command

pytestmark = pytest.mark.usefixtures("plain_workspaces")

gpumem = command("layers")

# A batch of 64: the input 64 · 256 · 4 bytes, and the outputs of the three layers.
FIRST = ACTIVATION = 64 * 1024 * 4
SECOND = 64 * 128 * 4


def test_numbers(gpumem: Command) -> None:
    net, first, activation, second = gpumem.json("net.py:model")

    assert [layer["path"] for layer in (net, first, activation, second)] == [
        "", "first", "activation", "second"
    ]  # fmt: skip
    assert first["inputs"] == [[64, 256]]
    assert second["outputs"] == [[64, 128]]
    assert first["parameters"] == 256 * 1024 + 1024
    assert net["parameters"] == 256 * 1024 + 1024 + 1024 * 128 + 128
    # A product of (64, 256) and (256, 1024): two operations for each of them.
    assert first["flops"] == 2 * 64 * 256 * 1024
    assert net["flops"] == 2 * 64 * 1024 * (256 + 128)


def test_memory_with_and_without_backward(gpumem: Command) -> None:
    net, first, _, second = gpumem.json("net.py:model")

    assert first["training"] == {"kept": FIRST, "peak": FIRST}
    # The first layer's output is dropped once ReLU has its own, which is kept for backward.
    assert net["training"] == {"kept": ACTIVATION + SECOND, "peak": FIRST + ACTIVATION}
    assert net["inference"] == {"kept": SECOND, "peak": FIRST + ACTIVATION}
    assert second["inference"] == {"kept": SECOND, "peak": SECOND}


def test_a_model_that_a_function_calls(gpumem: Command) -> None:
    assert [layer["kind"] for layer in gpumem.json("net.py:train")] == [
        "Net", "Linear", "ReLU", "Linear"
    ]  # fmt: skip


def test_the_table(gpumem: Command) -> None:
    code, lines = gpumem("net.py:model")

    assert code == 0
    assert lines[0] == "net.py:model: Net, 394,368 parameters, 50.33 MFLOPs"
    assert lines[3].split()[:3] == ["layer", "kind", "input"]
    assert lines[4].split() == [
        *("Net", "Net", "64×256", "64×128", "394,368", "50.33", "M"),
        *("288.0", "KiB", "512.0", "KiB", "32.0", "KiB", "512.0", "KiB"),
    ]
    assert lines[5].startswith("  first")
    assert lines[-1].startswith("the whole model keeps 288.0 KiB for backward")


def test_a_narrow_terminal_gets_fewer_columns(
    gpumem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.cli.layers.terminal_width", lambda: 80)
    _, lines = gpumem("net.py:model")
    assert max(map(len, lines)) <= 80
    assert lines[3].split()[:2] == ["layer", "output"]


def test_depth(gpumem: Command) -> None:
    assert [layer["kind"] for layer in gpumem.json("net.py:model", "--depth", "0")] == ["Net"]


def test_csv(gpumem: Command) -> None:
    _, lines = gpumem("net.py:model", "--csv")
    rows = list(csv.DictReader(lines))
    assert [row["layer"] for row in rows] == ["Net", "first", "activation", "second"]
    assert rows[0]["kept"] == str(288 * KIB)
    assert rows[0]["kept, inference"] == str(32 * KIB)
    assert rows[2]["output"] == "64×1024"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("net.py:nothing", "no model was called; let the function call one, or return it with"),
        ("net.py:broken", "net.py:broken raised RuntimeError"),
        ("net.py:absent", "net.py:absent: net has no absent"),
        ("net.py::test", "layers are those of a function; write path.py:function"),
    ],
)
def test_bad_input_is_one_sentence(gpumem: Command, target: str, sentence: str) -> None:
    assert sentence in gpumem.refusal(target)


def test_an_unknown_gpu(gpumem: Command) -> None:
    assert "'T5' is not a simulated GPU" in gpumem.refusal("net.py:model", "--gpu", "T5")
