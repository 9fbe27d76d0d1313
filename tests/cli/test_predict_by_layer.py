"""``gpumem predict --by layer``: a model layer by layer."""

from __future__ import annotations

import csv
from pathlib import Path
from textwrap import dedent

import pytest

from tests.cli.targets import KIB, Command, command

pytestmark = pytest.mark.usefixtures("plain_workspaces", "cnn")

CNN = """
    import torch
    from torch import nn

    def tokens():
        return nn.Embedding(100, 16)

    def vgg19():
        "The convolutions of VGG-19."
        layers, channels = [], 3
        for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers)

    class ByName(nn.Module):
        def forward(self, *, tokens, mask=None):
            return tokens * 2

    def keywords():
        return ByName(), {"tokens": torch.ones(8, 4, device="cuda")}

    class OfMapping(nn.Module):
        def forward(self, batch):
            return batch["tokens"] * 2

    def mapping():
        return OfMapping(), {"tokens": torch.ones(8, 4, device="cuda")}

    def norms():
        return nn.Sequential(
            nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False), nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
"""


@pytest.fixture
def cnn(tmp_path: Path) -> None:
    (tmp_path / "cnn.py").write_text(dedent(CNN))


gpumem = command("predict", "--by", "layer")

# A batch of 64: the input 64 · 256 · 4 bytes, and the outputs of the three layers.
FIRST = ACTIVATION = 64 * 1024 * 4
SECOND = 64 * 128 * 4


def test_numbers_of_each_layer(gpumem: Command) -> None:
    net, first, activation, second = gpumem.json("net.py:model")

    assert [layer["path"] for layer in (net, first, activation, second)] == [
        "", "first", "activation", "second"
    ]  # fmt: skip
    assert first["inputs"] == [[64, 256]]
    assert second["outputs"] == [[64, 128]]
    assert first["parameters"] == 256 * 1024 + 1024
    assert net["parameters"] == 256 * 1024 + 1024 + 1024 * 128 + 128
    # A product of (64, 256) and (256, 1024): two operations per multiply-add.
    assert first["flops"] == 2 * 64 * 256 * 1024
    # An activation is one of each element.
    assert net["flops"] == 2 * 64 * 1024 * (256 + 128) + 64 * 1024
    assert net["multiply_adds"] == 64 * 1024 * (256 + 128) + 64 * 1024


def test_bytes_read_and_written_by_each_layer(gpumem: Command) -> None:
    net, first, activation, second = gpumem.json("net.py:model")

    assert first["read"] == 64 * 256 * 4 + first["parameters"] * 4
    assert activation["read"] == activation["written"] == ACTIVATION
    assert net["read"] == sum(layer["read"] for layer in (first, activation, second))
    assert net["written"] == net["outputs_held"] == FIRST + ACTIVATION + SECOND


def test_vgg19_has_the_sizes_of_the_literature(gpumem: Command) -> None:
    layers = gpumem.json("cnn.py:vgg19", "--input", "1x3x224x224")

    assert layers[0]["parameters"] == 20_024_384
    # 65.53 MB of outputs; 124.94 MB if the ReLU were not in place.
    assert layers[0]["outputs_held"] == 65_529_856
    assert layers[0]["written"] == 124_938_240
    relu, pool = layers[2], layers[5]
    assert (relu["kind"], relu["outputs_held"]) == ("ReLU", 0)
    assert relu["multiply_adds"] == 64 * 224 * 224  # B·H·W·C
    # Three comparisons find the largest of four.
    assert (pool["kind"], pool["flops"]) == ("MaxPool2d", 3 * 64 * 112 * 112)
    convolution = 64 * 224 * 224 * 64 * 3 * 3
    assert (layers[3]["multiply_adds"], layers[3]["flops"]) == (convolution, 2 * convolution)


def test_operations_of_norms_and_other_pooling(gpumem: Command) -> None:
    _, norm, plain, average, adaptive, view = gpumem.json("cnn.py:norms", "--input", "2x8x4x4")

    elements = 2 * 8 * 4 * 4
    # Subtract the mean, divide by the deviation; multiply by the weight, add the bias.
    assert (norm["multiply_adds"], norm["flops"]) == (2 * elements, 4 * elements)
    assert (plain["multiply_adds"], plain["flops"]) == (elements, 2 * elements)
    assert (average["multiply_adds"], average["flops"]) == (elements, 4 * elements // 4)
    assert (adaptive["multiply_adds"], adaptive["flops"]) == (elements // 4, elements // 4)
    # A batch norm reads two weights and three buffers besides: 8 numbers each, and one of 8 bytes.
    assert norm["read"] == 4 * (elements + 4 * 8) + 8
    assert (view["written"], view["outputs_held"]) == (4 * 2 * 8, 0)


def test_a_model_of_tokens(gpumem: Command) -> None:
    (embedding,) = gpumem.json("cnn.py:tokens", "--input", "8x256:int64")
    assert embedding["written"] == 8 * 256 * 16 * 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [],
            "the function returned a Sequential without its inputs (missing a required argument: "
            "'input'); give their shapes, like --input 1x3x224x224 or 8x256:int64, or return "
            "them with it",
        ),
        (["--input", "3by4"], "argument --input: '3by4' is not a shape; write 1x3x224x224"),
        (["--input", "1x3x0"], "argument --input: '1x3x0' is not a shape; write 1x3x224x224"),
        (
            ["--input", "8x256:long"],
            "argument --input: '8x256:long' is of none of float32, float16, bfloat16, float64, "
            "int64, int32, uint8, bool",
        ),
    ],
)
def test_a_model_without_inputs_is_refused(
    gpumem: Command, arguments: list[str], sentence: str
) -> None:
    assert sentence in gpumem.refusal("cnn.py:vgg19", *arguments)


@pytest.mark.parametrize("name", ["keywords", "mapping"])
def test_inputs_may_be_a_mapping(gpumem: Command, name: str) -> None:
    (layer,) = gpumem.json(f"cnn.py:{name}", "--gpu", "T4")
    assert layer["inputs"] == [[8, 4]]


def test_memory_with_and_without_backward(gpumem: Command) -> None:
    net, first, _, second = gpumem.json("net.py:model")

    assert first["training"] == {"kept": FIRST, "peak": FIRST}
    # The first layer's output is freed once ReLU has its own, which is kept for backward.
    assert net["training"] == {"kept": ACTIVATION + SECOND, "peak": FIRST + ACTIVATION}
    assert net["inference"] == {"kept": SECOND, "peak": FIRST + ACTIVATION}
    assert second["inference"] == {"kept": SECOND, "peak": SECOND}


def test_a_model_that_a_function_calls_is_shown(gpumem: Command) -> None:
    assert [layer["kind"] for layer in gpumem.json("net.py:train")] == [
        "Net", "Linear", "ReLU", "Linear"
    ]  # fmt: skip


def test_the_table_of_layers(gpumem: Command) -> None:
    code, lines = gpumem("net.py:model")

    assert code == 0
    assert lines[0] == "net.py:model: Net, 394,368 parameters, 25.23 M multiply-adds, 50.40 MFLOPs"
    assert lines[3].split()[:3] == ["layer", "kind", "input"]
    assert lines[4].split() == [
        *("Net", "Net", "64×256", "64×128", "394,368", "25.23", "M", "50.40", "M"),
        *("2.1", "MiB", "544.0", "KiB"),
        *("288.0", "KiB", "512.0", "KiB", "32.0", "KiB", "512.0", "KiB"),
    ]
    assert lines[5].startswith("  first")
    assert lines[-2].startswith("the whole model keeps 288.0 KiB for backward")
    assert lines[-1] == (
        "the outputs of its layers are 544.0 KiB, and as much again with their gradients"
    )


def test_a_narrow_terminal_gets_fewer_columns(
    gpumem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.cli.by_part.terminal_width", lambda: 80)
    _, lines = gpumem("net.py:model")
    assert max(map(len, lines)) <= 80
    assert lines[3].split()[:2] == ["layer", "output"]


def test_depth_limits_the_nesting_of_layers(gpumem: Command) -> None:
    assert [layer["kind"] for layer in gpumem.json("net.py:model", "--depth", "0")] == ["Net"]


def test_csv_has_the_numbers_of_the_table(gpumem: Command) -> None:
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


def test_an_unknown_gpu_is_refused(gpumem: Command) -> None:
    assert "'T5' is not a GPU model" in gpumem.refusal("net.py:model", "--gpu", "T5")


ON_THE_CPU = """
    import torch
    from torch import nn

    def model():
        return nn.Linear(8, 8), torch.zeros(1, 8)
"""


def test_a_model_on_the_cpu_is_noted(gpumem: Command, tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(dedent(ON_THE_CPU))
    _, printed = gpumem("host.py:model")
    assert " ".join(printed).endswith(
        "nothing was allocated on the simulated A100-40GB, as of a model on the CPU: move the "
        "model and its inputs there, as .cuda() does"
    )
    assert "keeps 0 B" not in " ".join(printed)
    assert "nothing was allocated" not in " ".join(gpumem("net.py:model")[1])


GRAPH = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))
            self.register_buffer("neighbours", torch.eye(16).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.neighbours, x @ self.weight)

    def model():
        return Layer().cuda(), torch.zeros(16, 8, device="cuda")
"""


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_layer_with_a_sparse_buffer(gpumem: Command, tmp_path: Path) -> None:
    """Its input, its weight, and the buffer as if it were dense."""
    (tmp_path / "graph.py").write_text(dedent(GRAPH))
    (layer,) = gpumem.json("graph.py:model")

    assert layer["read"] == 4 * (16 * 8 + 8 * 4 + 16 * 16)
