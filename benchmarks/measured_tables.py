"""Measured numbers against the same programs under simulation: two public tables.

    python benchmarks/measured_tables.py [-v] [ROWS]

``gpumemnet_mlp.csv``: nvidia-smi on an A100 while a perceptron trains, one constant of context on
top of reserved memory; a random sample of ROWS rows, by default 300 (some minutes).
``liger_operators.csv``: peak allocated of one operator, exact (programs: measured_operators.py).
The data are read from $GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository).
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

import torch
from measured_operators import OPERATORS, Row
from recordings import GROUND_TRUTH
from torch import nn

from pytest_gpumem import simulate

MIB = 2**20

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
    """The distance of a sample of rows from the measurements, in MiB."""

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

GPUS = {
    "NVIDIA A100-SXM4-80GB": ("A100-80GB", "2.6"),
    "NVIDIA H100 PCIe": ("H100", "2.6"),
    "NVIDIA H100 80GB HBM3": ("H100", "2.6"),
    "NVIDIA GeForce RTX 3090": ("RTX-3090", "2.6"),
    "NVIDIA GeForce RTX 4090": ("RTX-4090", "2.6"),
    "NVIDIA B200": ("B200", "2.10"),
}
"""The simulated GPU, and a release for it: which one ran is not on record."""


def operator_peak(row: Row) -> float:
    """Median peak of ten calls, in MiB."""
    gpu, release = GPUS[row["gpu"]]
    with simulate(gpu, torch_version=release, alloc_conf=""):
        call = OPERATORS[row["operator"]](row, json.loads(row["config"]))
        peaks = []
        for _ in range(10):
            torch.cuda.reset_peak_memory_stats()
            call()
            peaks.append(torch.cuda.max_memory_allocated() / MIB)
    return statistics.median(peaks)


def operator_table() -> Iterator[tuple[Row, float, bool]]:
    """Every row that has a program with the simulated peak in MiB, and whether it is the measured.

    The measurements are 32-bit floats, which hold every byte below 16 GiB only.
    """
    for row in rows("liger_operators.csv"):
        if row["operator"] not in OPERATORS or row["gpu"] not in GPUS:
            continue
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
