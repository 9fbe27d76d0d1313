"""Measured numbers against the same programs under simulation: two public tables.

    python benchmarks/measured_tables.py [ROWS]

``gpumemnet_mlp.csv`` (nvidia-smi on an A100, one constant of context on top of reserved memory; a
random sample of ROWS rows, by default 300) and ``liger_operators.csv`` (peak allocated, exact).
The data are read from $GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository).
"""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from fidelity import GROUND_TRUTH
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


# Multi-layer perceptrons.


def widths(row: Row) -> list[int]:
    """Widths of the hidden layers."""
    inputs, outputs, depth = int(row["input"]), int(row["output"]), int(row["depth"])
    arch = row["arch"]
    if arch == "uniform":
        return [inputs] * depth
    if arch == "gradual":
        step = (inputs - outputs) // depth
        return [max(outputs, inputs - step * (i + 1)) for i in range(depth)]
    halved = [max(outputs, inputs // 2 ** (i + 1)) for i in range(depth)]
    if arch == "bottleneck":
        halved[-1] = max(outputs, halved[-1] // 2)
    return halved


def network(row: Row) -> nn.Sequential:
    """The network of a row."""
    layers: list[nn.Module] = []
    previous = int(row["input"])
    for width in widths(row):
        layers.append(nn.Linear(previous, width))
        if row["batchnorm"] == "True":
            layers.append(nn.BatchNorm1d(width))
        layers.append(ACTIVATIONS[row["activation"]]())
        if row["dropout"] == "True":
            layers.append(nn.Dropout(0.5))
        previous = width
    layers += [nn.Linear(previous, int(row["output"])), nn.Softmax(dim=1)]
    return nn.Sequential(*layers)


def mlp_reserved(row: Row) -> int:
    """Reserved bytes after a summary pass and two epochs."""
    batch = int(row["batch"])
    with simulate("A100-40GB", torch_version="2.6", alloc_conf=""):
        model = network(row).cuda()
        hooks = [layer.register_forward_hook(lambda *_: None) for layer in model]
        model(torch.rand(2, 1, int(row["input"])).cuda().squeeze(1))
        for hook in hooks:
            hook.remove()
        optimizer = torch.optim.Adam(model.parameters())
        measure = nn.CrossEntropyLoss()
        for _ in range(2):
            for start in range(0, 4096, batch):
                size = min(batch, 4096 - start)
                x = torch.rand(size, int(row["input"])).cuda()
                y = torch.zeros(size, dtype=torch.long).cuda()
                optimizer.zero_grad()
                outputs = model(x)
                loss = measure(outputs, y)
                loss.backward()
                optimizer.step()
        return torch.cuda.memory_reserved()


def mlp_table(count: int) -> None:
    """Print how far the sample is from the measurements."""
    every = [
        row
        for row in rows("gpumemnet_mlp.csv")
        if not (row["batchnorm"] == "True" and 4096 % int(row["batch"]) == 1)
    ]
    sample = random.Random(0).sample(every, min(count, len(every)))
    differences = [int(row["measured_mib"]) - mlp_reserved(row) / MIB for row in sample]
    context, _ = Counter(differences).most_common(1)[0]
    errors = [difference - context for difference in differences]
    sizes = sorted(map(abs, errors))
    print(
        f"gpumemnet: {len(sample)} rows, context {context:.0f} MiB, exact "
        f"{sum(e == 0 for e in errors) / len(errors):.1%}, within 2 MiB "
        f"{sum(s <= 2 for s in sizes) / len(sizes):.1%}, median {statistics.median(sizes):.0f}, "
        f"p95 {sizes[int(0.95 * len(sizes))]:.0f}"
    )
    if "-v" in sys.argv:
        for error, row in sorted(zip(errors, sample, strict=True), key=lambda p: -abs(p[0]))[:25]:
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


def operator_table() -> None:
    """Print every row."""
    for row in rows("liger_operators.csv"):
        measured, simulated = float(row["peak_mib"]), operator_peak(row)
        same = f"{measured:.4f}" == f"{simulated:.4f}"
        print(
            f"{row['operator']:14} {row['mode']:8} {row['x']:>7} {measured:14.4f} "
            f"{simulated:14.4f} {'' if same else simulated - measured}"
        )


if __name__ == "__main__":
    operator_table()
    mlp_table(next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 300))
