"""``gpumem predict --by line``: memory by source line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem import simulate
from tests.cli.targets import KIB, MIB, NET, Command, command

pytestmark = pytest.mark.usefixtures("plain_workspaces")

gpumem = command("predict", "--by", "line")

WORKSPACE = 8_519_680
"""The workspace of cuBLAS on a T4: 4096 · 2 + 16 · 8 KiB, for each thread that multiplies."""
PARAMETERS = 1024 * KIB + 4 * KIB + 512 * KIB + 512


def by_source(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["source"]: line for line in lines}


def rest(group: dict[str, Any]) -> tuple[str, int]:
    return group["kind"], group["bytes"]


def groups(line: dict[str, Any], name: str = "added") -> list[tuple[Any, ...]]:
    return [
        (one["count"], one["shape"] if one["shape"] is None else tuple(one["shape"]), *rest(one))
        for one in line[name]
    ]


def test_each_line_has_memory_before_after_and_added(gpumem: Command) -> None:
    found = by_source(gpumem.json("net.py:train", "--gpu", "T4"))

    made = found["net = Net().cuda()"]
    assert (made["before"], made["after"]) == (0, PARAMETERS)
    assert groups(made) == [
        (1, (1024, 256), "Parameter", 1024 * KIB),
        (1, (128, 1024), "Parameter", 512 * KIB),
        (1, (1024,), "Parameter", 4 * KIB),
        (1, (128,), "Parameter", 512),
    ]
    x = found['x = torch.randn(64, 256, device="cuda")']
    assert groups(x) == [(1, (64, 256), "Tensor", 64 * KIB)]
    forward = found["loss = net(x).sum()"]
    # ReLU's output is kept for backward; the net's output is not, as sum() needs only its shape.
    assert groups(forward) == [
        (1, None, "workspace", WORKSPACE),
        (1, (64, 1024), "Tensor", 256 * KIB),
        (1, (), "Tensor", 512),
    ]
    assert forward["after"] == PARAMETERS + 64 * KIB + WORKSPACE + 256 * KIB + 512
    backward = found["loss.backward()"]
    kinds = {kind: sum(g[3] for g in groups(backward) if g[2] == kind) for kind in KINDS}
    assert kinds == {"workspace": WORKSPACE, "gradient": PARAMETERS}
    assert groups(backward, "removed") == [(1, (64, 1024), "Tensor", 256 * KIB)]
    assert groups(found["optimizer.step()"]) == []


KINDS = ("workspace", "gradient")


def test_lines_that_run_several_times_are_one(gpumem: Command) -> None:
    (gpumem.folder / "net.py").write_text(
        NET
        + "\n\ndef repeated():\n    kept = []\n    for _ in range(3):\n"
        + '        kept.append(torch.empty(1 << 20, device="cuda"))\n'
    )
    found = by_source(gpumem.json("net.py:repeated"))
    line = found['kept.append(torch.empty(1 << 20, device="cuda"))']
    assert line["times"] == 3
    assert groups(line) == [(3, (1 << 20,), "Tensor", 3 << 22)]


def test_optimizer_state_has_its_name(gpumem: Command) -> None:
    (gpumem.folder / "net.py").write_text(NET.replace("SGD(", "Adam("))
    found = by_source(gpumem.json("net.py:train"))
    added = groups(found["optimizer.step()"])
    # Two tensors of the shape of each parameter.
    assert {kind for _, _, kind, _ in added} == {"optimizer state"}
    assert sum(size for *_, size in added) == 2 * PARAMETERS


def test_lines_of_further_functions_are_shown(gpumem: Command) -> None:
    lines = gpumem.json("net.py:train", "--function", "net.py:Net.forward")
    assert {line["function"] for line in lines} == {"train", "forward"}
    assert groups(by_source(lines)["x = self.activation(x)"], "removed") == [
        (1, (64, 1024), "Tensor", 256 * KIB)
    ]


def test_the_text_of_lines(gpumem: Command) -> None:
    code, lines = gpumem("net.py:train", "--gpu", "T4")

    assert code == 0
    assert lines[0] == "net.py, train()"
    assert lines[1].split() == [
        *("20", "net", "=", "Net().cuda()", "0", "B", "->", "1.5", "MiB", "peak", "1.5", "MiB"),
        *("process", "2.0", "MiB"),
    ]
    assert "        + 1 × (1024,256) 1.0 MiB float32 Parameter" in lines
    assert "        + 1 × 8.1 MiB workspace" in lines
    assert "        - 1 × (64,1024) 256.0 KiB float32 Tensor" in lines


def test_the_device_is_named_where_there_are_several(gpumem: Command) -> None:
    _, lines = gpumem("net.py:train", "--gpu", "T4*2")
    assert lines[0] == "net.py, train(), cuda:0 of T4*2"


def test_memory_of_a_simulated_process_is_the_reserved_memory(gpumem: Command) -> None:
    found = by_source(gpumem.json("net.py:train", "--gpu", "T4"))
    assert found["net = Net().cuda()"]["process"] == 2 * MIB  # the first segment


def test_memory_of_a_process_on_a_gpu_is_read_from_nvml(
    gpumem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter(range(400 * MIB, 500 * MIB, MIB))
    reading = "pytest_gpumem.prediction.lines.read_device"
    monkeypatch.setattr(reading, lambda device: SimpleNamespace(process_used=next(held)))
    with simulate("H100"):  # a stand-in for the device: only torch is queried
        lines = gpumem.json("net.py:train", "--gpu", "cuda")
    assert [line["process"] for line in lines] == [
        (400 + number) * MIB for number in range(len(lines))
    ]
    assert by_source(lines)["net = Net().cuda()"]["after"] == PARAMETERS


def test_an_absent_device_is_refused(gpumem: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpumem.refusal("net.py:train", "--gpu", "cuda") == (
        "gpumem: torch sees no CUDA device; name a model to be simulated"
    )


def test_a_narrow_terminal_shortens_the_source(
    gpumem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.cli.by_part.terminal_width", lambda: 80)
    _, lines = gpumem("net.py:train")
    assert max(map(len, lines)) <= 80
    assert any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["net.py:needs"], "cannot be called without arguments"),
        (["net.py:broken"], "net.py:broken raised RuntimeError"),
        (["net.py::test"], "lines are those of a function; write path.py:function"),
        (["net.py:train", "--function", "net.py:torch.cos"], "has no lines; name a function"),
        (["net.py:train", "--gpu", "T5"], "'T5' is not a GPU model"),
    ],
)
def test_bad_input_is_one_sentence(gpumem: Command, arguments: list[str], sentence: str) -> None:
    assert sentence in gpumem.refusal(*arguments)
