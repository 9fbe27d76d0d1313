"""Measured numbers against the same programs under simulation: two public tables.

    python benchmarks/measured_tables.py [-v] [ROWS]

``gpumemnet_mlp.csv``: nvidia-smi on an A100 while a perceptron trains, one constant of context on
top of reserved memory; a random sample of ROWS rows, by default 300 (some minutes).
``liger_operators.csv``: peak allocated of one operator, exact. The data are read from
$GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository).
"""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import pack
from typing import Any

import torch
from recordings import GROUND_TRUTH
from torch import Tensor, nn
from torch.nn import functional

from pytest_gpumem import simulate

MIB = 2**20
Row = dict[str, str]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "prelu": nn.PReLU,
    "hardswish": nn.Hardswish,
    "identity": nn.Identity,
}


def rows(name: str) -> list[Row]:
    """The table called ``name``."""
    with (GROUND_TRUTH / name).open(newline="") as file:
        return list(csv.DictReader(file))


# Multi-layer perceptrons: itu-rad/GPUMemNet f01eb05, NeuroNetGen_scripts/MLP/mlp_next.py.

SAMPLES = 4096
EPOCHS = 2
"""Later epochs repeat the second in nearly all rows."""


def usable(row: Row) -> bool:
    """Whether the run lasted: batch norm fails on a last batch of one sample."""
    return not (row["batchnorm"] == "True" and SAMPLES % int(row["batch"]) == 1)


def widths(row: Row) -> Iterator[int]:
    """Widths of the hidden layers; a bottleneck has one more than its depth says."""
    inputs, outputs, depth = int(row["input"]), int(row["output"]), int(row["depth"])
    arch = row["arch"]
    width = inputs
    for _ in range(depth + (arch == "bottleneck")):
        if arch == "gradual":
            width -= (inputs - outputs) // depth
        elif arch != "uniform":
            width //= 2
        width = max(width, outputs) if arch != "uniform" else width
        yield width


def network(row: Row) -> nn.Sequential:
    """The network of a row; the activation after the last layer of one output is not on record."""
    layers: list[nn.Module] = []
    previous = int(row["input"])
    for width in widths(row):
        layers.append(nn.Linear(previous, width))
        if row["batchnorm"] == "True":
            layers.append(nn.BatchNorm1d(width))
        layers.append(ACTIVATIONS[row["activation"]]())
        if row["dropout"] == "True":
            layers.append(nn.Dropout(0.3))
        previous = width
    outputs = int(row["output"])
    layers.append(nn.Linear(previous, outputs))
    layers.append(nn.Softmax(dim=1) if outputs > 1 else nn.Identity())
    return nn.Sequential(*layers)


def summarize(model: nn.Sequential, inputs: int) -> None:
    """The pass of two rows that torchsummary makes."""
    x = [torch.rand(2, 1, inputs).cuda()]
    seen = []
    hooks = [layer.register_forward_hook(lambda layer, *_: seen.append(layer)) for layer in model]
    model(x[0].view(2, -1))
    for hook in hooks:
        hook.remove()


def mlp_reserved(row: Row) -> int:
    """Reserved bytes after a summary pass and the epochs; steps that repeat others are skipped."""
    batch, inputs, outputs = (int(row[name]) for name in ("batch", "input", "output"))
    with simulate("A100-40GB", torch_version="2.6", alloc_conf=""):
        model = network(row).cuda()
        summarize(model, inputs)
        measure = nn.CrossEntropyLoss() if outputs > 1 else nn.BCEWithLogitsLoss()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(EPOCHS):
            left = SAMPLES // batch
            seen: dict[int, int] = {}
            while left or SAMPLES % batch:
                size = batch if left else SAMPLES % batch
                x, y = torch.zeros(size, inputs), torch.zeros(size, dtype=torch.long)
                x, y = x.to("cuda"), y.to("cuda")
                optimizer.zero_grad()
                scores = model(x)
                if outputs == 1:
                    y = y.view(-1, 1).float()
                loss = measure(scores, y)
                loss.backward()
                optimizer.step()
                if not left:
                    break
                left -= 1
                state = layout()
                if state in seen and left:
                    # The same blocks as some steps ago: what follows repeats, so skip whole rounds.
                    left %= seen[state] - left
                    seen = {}
                seen[state] = left
        return torch.cuda.memory_reserved()


def layout() -> int:
    """Identifies the present blocks: addresses, sizes and states."""
    return hash(
        tuple(
            (block["address"], block["size"], block["state"])
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
        )
    )


@dataclass(frozen=True)
class MlpTable:
    """How far a sample of rows is from the measurements, in MiB."""

    rows: list[tuple[float, Row]]
    """Measured minus simulated and the context, and the row."""
    context: float

    @property
    def errors(self) -> list[float]:
        """Absolute errors, ascending."""
        return sorted(abs(error) for error, _ in self.rows)

    def within(self, mib: float) -> float:
        """The part of the rows that are at most ``mib`` off."""
        return sum(error <= mib for error in self.errors) / len(self.rows)

    def percentile(self, part: float) -> float:
        """The error that ``part`` of the rows do not exceed."""
        return self.errors[min(int(part * len(self.rows)), len(self.rows) - 1)]


def mlp_table(count: int, seed: int = 0) -> MlpTable:
    """Simulate a random sample; the context is the commonest difference."""
    every = [row for row in rows("gpumemnet_mlp.csv") if usable(row)]
    sample = random.Random(seed).sample(every, min(count, len(every)))
    differences = [int(row["measured_mib"]) - mlp_reserved(row) / MIB for row in sample]
    context, _ = Counter(differences).most_common(1)[0]
    return MlpTable(
        [(difference - context, row) for difference, row in zip(differences, sample, strict=True)],
        context,
    )


def print_mlp_table(count: int) -> None:
    """Print how far the sample is from the measurements."""
    table = mlp_table(count)
    print(
        f"gpumemnet: {len(table.rows)} rows, context {table.context:.0f} MiB, exact "
        f"{table.within(0):.1%}, within 2 MiB {table.within(2):.1%}, median "
        f"{statistics.median(table.errors):.0f}, p95 {table.percentile(0.95):.0f}"
    )
    if "-v" in sys.argv:
        for error, row in sorted(table.rows, key=lambda pair: -abs(pair[0])):
            if error:
                print(f"  {error:+7.0f}  {row}")


# Operators.


def cross_entropy(row: Row, config: dict[str, Any]) -> Callable[[], Any]:
    """Set up one row; the result is what is measured."""
    tokens, vocabulary = config["B"] * config["T"], int(row["x"])
    x = torch.randn(tokens, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (tokens, 1), device="cuda").squeeze(1)
    return lambda: functional.cross_entropy(x, target).backward()


def kl_div(row: Row, config: dict[str, Any]) -> Callable[[], Any]:
    """Set up one row; the result is what is measured."""
    tokens, vocabulary = config["B"] * config["T"], int(row["x"])
    x = torch.randn(tokens, vocabulary, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(tokens, vocabulary, device="cuda").softmax(dim=-1)
    measure = nn.KLDivLoss(reduction="batchmean")
    return lambda: measure(x, target).backward(retain_graph=True)


def layer_norm(row: Row, config: dict[str, Any]) -> Callable[[], Any]:
    """Set up one row; the result is what is measured."""
    size = int(row["x"])
    x = torch.randn(config["M"], size, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    rival = nn.LayerNorm(size, eps=config["eps"]).cuda()
    layer = nn.LayerNorm(size, eps=config["eps"]).cuda()

    def full(_: Any = rival) -> None:
        layer(x).backward(gradient, retain_graph=True)

    return full


class GatedLayer(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        inner = functional.gelu(self.gate(x), approximate="tanh") * self.up(x)
        output: Tensor = self.down(inner)
        return output


def geglu(row: Row, config: dict[str, Any]) -> Callable[[], Any]:
    """Set up one row; the result is what is measured."""
    hidden = config["hidden_size"]
    layer = GatedLayer(hidden, config["intermediate_size"]).to("cuda").to(torch.bfloat16)
    shape = (config["bsz"], int(row["x"]), hidden)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if row["mode"] == "forward":
        torch.ones(2, 2, device="cuda", requires_grad=True).mm(torch.ones(2, 2, device="cuda"))
        warm = torch.ones(2, 2, device="cuda", requires_grad=True)
        (warm @ warm).sum().backward()
        del warm
        return lambda: layer(x)
    if row["mode"] == "backward":
        output = layer(x)
        gradient = torch.randn_like(output)
        return lambda: output.backward(gradient, retain_graph=True)

    def full() -> None:
        output = layer(x)
        output.backward(torch.randn_like(output), retain_graph=True)

    return full


OPERATORS = {
    "cross_entropy": cross_entropy,
    "kl_div": kl_div,
    "layer_norm": layer_norm,
    "geglu": geglu,
}


def operator_peak(row: Row) -> float:
    """Median peak of ten calls, in MiB."""
    gpu = "H100" if "H100" in row["gpu"] else "A100-80GB"
    with simulate(gpu, torch_version="2.6", alloc_conf=""):
        call = OPERATORS[row["operator"]](row, json.loads(row["config"]))
        peaks = []
        for _ in range(10):
            torch.cuda.reset_peak_memory_stats()
            call()
            peaks.append(torch.cuda.max_memory_allocated() / MIB)
    return statistics.median(peaks)


def operator_table() -> Iterator[tuple[Row, float, bool]]:
    """Every row with the simulated peak in MiB, and whether it is the measured one.

    The measurements are 32-bit floats, which hold every byte below 16 GiB only.
    """
    for row in rows("liger_operators.csv"):
        simulated = operator_peak(row)
        yield row, simulated, pack("f", float(row["peak_mib"])) == pack("f", simulated)


def main() -> None:
    """Print both tables."""
    for row, simulated, same in operator_table():
        print(
            f"{row['operator']:14} {row['mode']:8} {row['x']:>7} {float(row['peak_mib']):14.4f} "
            f"{simulated:14.4f} {'' if same else simulated - float(row['peak_mib'])}"
        )
    print_mlp_table(next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 300))


if __name__ == "__main__":
    main()
