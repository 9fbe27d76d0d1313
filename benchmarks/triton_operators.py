"""Measured peaks of Liger's Triton kernels against the same programs under simulation.

    pip install --no-deps triton liger-kernel==0.6.4
    python benchmarks/triton_operators.py [--releases FOLDER...]

``triton_operators.csv`` of $GPUMEM_GROUNDTRUTH holds what Liger-Kernel's benchmark measured of its
own kernels (benchmark/data), mostly between two releases of theirs: each operator is run with the
release that has the measured code, see RELEASES, and only where that one is installed. FOLDERs are
made by ``pip install --no-deps --target FOLDER liger-kernel==...``; each runs in its own process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from struct import pack
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from measured_operators import (
    OPERATORS,
    Call,
    Config,
    Row,
    _asked,
    _dtype,
    _given,
    _made,
    _of_logits,
)
from measured_tables import GPUS, MIB, rows
from torch import nn

from pytest_gpumem import simulate

TABLE = "triton_operators.csv"

RELEASES = {
    ("cross_entropy", "0.2.1"): "0.2.1",
    ("geglu", "0.2.1"): "0.2.1",
    ("rms_norm", "0.2.1"): "0.2.1",
    ("layer_norm", "0.2.1"): "0.3.1",
    ("kl_div", "0.2.1"): "0.3.1",
    ("fused_linear_jsd", "0.3.1"): "0.3.1.dev20241014210825",  # of liger-kernel-nightly
    ("fused_linear_cross_entropy", "0.4.2"): "0.4.2",
    ("softmax", "0.5.8"): "0.6.0",
    ("layer_norm", "0.6.0"): "0.6.1",
    ("tiled_geglu", "0.6.3"): "0.6.4",
    ("group_norm", "0.7.0"): "0.8.0",
    ("relu_squared", "0.7.0"): "0.8.0",
}
"""The first release with the measured code, by operator and by the version that is on record."""

IN_SEQUENCE = {
    "fused_linear_cross_entropy": (4096, 8192, 16384, 32768),
    "fused_linear_jsd": (1024, 2048, 4096, 8192),
}
"""Operators whose peaks depend on what the script's earlier runs left in the cache, and the sizes
of these: a free block is only split from 1 MiB of remainder on, and what is not split counts. The
script times Liger's and then PyTorch's, forward and then with backward, each at all sizes, before
it measures Liger's, all in one process (benchmark/scripts of the releases above)."""

TIMING_CACHE = 256_000_000
"""Bytes that ``triton.testing.do_bench`` clears between calls."""


def _liger(module: str, name: str) -> Any:
    """A module of Liger's, without all of its models: old releases do not fit new transformers."""
    package = "liger_kernel.transformers"
    if package not in sys.modules:
        spec = importlib.util.find_spec("liger_kernel")
        assert spec is not None
        made = sys.modules[package] = ModuleType(package)
        made.__path__ = [f"{next(iter(spec.submodule_search_locations or ()))}/transformers"]
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def cross_entropy(row: Row, config: Config) -> Call:
    """Cross entropy of logits, whose gradient takes their place."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    x = _made(tokens, vocabulary)
    target = torch.randint(vocabulary, (tokens, 1), device="cuda").squeeze(1)
    loss = _liger("cross_entropy", "LigerCrossEntropyLoss")()
    return lambda: loss(x, target).backward()


def kl_div(row: Row, config: Config) -> Call:
    """Divergence of two distributions."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    x = _made(tokens, vocabulary).log_softmax(dim=-1)
    target = torch.randn(tokens, vocabulary, device="cuda").softmax(dim=-1)
    measure = _liger("kl_div", "LigerKLDIVLoss")(reduction="batchmean")
    return lambda: measure(x, target).backward(retain_graph=True)


def _norm(row: Row, config: Config, layer: nn.Module, rival: nn.Module, *shape: int) -> Call:
    x = torch.randn(shape, dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return _given(lambda: layer(x), gradient, rival)


def layer_norm(row: Row, config: Config) -> Call:
    """Layer norm over rows, and PyTorch's."""
    size = int(row["x"])
    layer = _liger("layer_norm", "LigerLayerNorm")(hidden_size=size).cuda()
    return _norm(row, config, layer, nn.LayerNorm(size).cuda(), config["M"], size)


def rms_norm(row: Row, config: Config) -> Call:
    """Root mean square norm, and the weight of its rival."""
    size = int(row["x"])
    layer = _liger("rms_norm", "LigerRMSNorm")(hidden_size=size, eps=config["eps"]).cuda()
    rival = nn.Linear(size, 1, bias=False, device="cuda")
    return _norm(row, config, layer, rival, config["M"], size)


def group_norm(row: Row, config: Config) -> Call:
    """Group norm, and PyTorch's; every mode was measured forward and backward."""
    channels = int(row["x"])
    groups, eps = channels // config["channels_per_group"], config["eps"]
    kind = _liger("group_norm", "LigerGroupNorm")
    layer = kind(num_channels=channels, num_groups=groups, eps=eps).cuda()
    rival = nn.GroupNorm(groups, channels, eps=eps).cuda()
    return _norm(row, config, layer, rival, config["M"], channels, config["H"])


def _of_one_row(row: Row, config: Config, layer: nn.Module) -> Call:
    x = _made(int(row["x"]), dtype=_dtype(config))

    def full() -> None:
        y = layer(x)
        y.backward(torch.ones_like(y), retain_graph=True)

    return full


def softmax(row: Row, config: Config) -> Call:
    """Softmax of one row."""
    return _of_one_row(row, config, _liger("softmax", "LigerSoftmax")())


def relu_squared(row: Row, config: Config) -> Call:
    """The square of a ReLU of one row."""
    return _of_one_row(row, config, _liger("relu_squared", "LigerReLUSquared")())


def _gated(row: Row, config: Config, kind: Any, **options: Any) -> Call:
    names = ("hidden_size", "intermediate_size", "hidden_act")
    sizes = SimpleNamespace(**{name: config[name] for name in names})
    dtype = _dtype(config)
    layer = kind(config=sizes, **options).to("cuda").to(dtype)
    x = _made(config["bsz"], int(row["x"]), config["hidden_size"], dtype=dtype)
    if row["mode"] == "forward":
        return lambda: layer(x)
    if row["mode"] == "backward":
        gradient, output = torch.randn_like(x), layer(x)
        return lambda: output.backward(gradient, retain_graph=True)

    def full() -> None:
        output = layer(x)
        output.backward(torch.randn_like(output), retain_graph=True)

    return full


def geglu(row: Row, config: Config) -> Call:
    """The gated layer with GELU."""
    return _gated(row, config, _liger("geglu", "LigerGEGLUMLP"))


def tiled_geglu(row: Row, config: Config) -> Call:
    """The gated layer with GELU, whole or in parts of the sequence."""
    if row["provider"] == "liger":
        return geglu(row, config)
    kind = _liger("tiled_mlp", "LigerTiledGEGLUMLP")
    return _gated(row, config, kind, num_shards=config["num_shards"])


def _linear(config: Config) -> nn.Linear:
    return nn.Linear(config["H"], config["V"], bias=False, dtype=_dtype(config), device="cuda")


def fused_linear_cross_entropy(row: Row, config: Config) -> Call:
    """The last layer of a language model and its loss in one, and the layer of its rival."""
    tokens = int(row["x"])
    layer, rival = _linear(config), _linear(config)
    x = _made(tokens, config["H"], dtype=_dtype(config))
    target = torch.randint(config["V"], (tokens, 1), device="cuda").squeeze(1)
    kind = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")
    loss = kind(ignore_index=-100, reduction="mean")

    def forward(_: Any = rival) -> Any:
        return loss(layer.weight, x, target)

    return _asked(row, forward)


def fused_linear_jsd(row: Row, config: Config) -> Call:
    """The last layers of two language models and their divergence in one."""
    *rivals, student, teacher = (_linear(config) for _ in range(4))
    for layer, rival in zip((student, teacher), rivals, strict=True):
        rival.weight.data = layer.weight.data = torch.rand_like(layer.weight)
    shape, dtype = (int(row["x"]), config["H"]), _dtype(config)
    seen, told = (torch.rand(shape, dtype=dtype, device="cuda") for _ in range(2))
    seen.requires_grad_(True)
    loss = _liger("fused_linear_jsd", "LigerFusedLinearJSD")(0.5, 1.0)

    def forward(_: Any = rivals) -> Any:
        return loss(seen, student.weight, told, teacher.weight)

    return _asked(row, forward)


def installed() -> str:
    """The release of Liger that is imported, a nightly one maybe."""
    names = ("liger-kernel", "liger-kernel-nightly")
    return next(
        each.version for each in distributions() if each.metadata["Name"].replace("_", "-") in names
    )


PROGRAMS: dict[str, Callable[[Row, Config], Call]] = {
    program.__name__: program
    for program in (
        *(cross_entropy, fused_linear_cross_entropy, fused_linear_jsd, geglu, group_norm, kl_div),
        *(layer_norm, relu_squared, rms_norm, softmax, tiled_geglu),
    )
}
_MULTIPLY = frozenset({"geglu", "tiled_geglu"})
"""Operators whose scripts had multiplied matrices before, forward and backward: timing, and the
rival's runs. So both threads of the process have their workspace of cuBLAS."""


def peak(row: Row) -> float:
    """Median peak of ten calls, in MiB."""
    gpu, release = GPUS[row["gpu"]]
    with simulate(gpu, torch_version=release, alloc_conf=""):
        if row["operator"] in _MULTIPLY:
            warm = torch.ones(2, 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            (warm @ warm).sum().backward()
            del warm
            torch.cuda.empty_cache()
        return _median(PROGRAMS[row["operator"]](row, json.loads(row["config"])))


def _median(call: Call) -> float:
    peaks = []
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated() / MIB)
    return sorted(peaks)[5]


def peaks_in_sequence(measured: list[Row]) -> list[float]:
    """Median peaks of ``measured``, rows of one operator, behind the script's earlier runs."""
    operator, config = measured[0]["operator"], json.loads(measured[0]["config"])
    gpu, release = GPUS[measured[0]["gpu"]]
    sizes = IN_SEQUENCE[operator]
    with simulate(gpu, torch_version=release, alloc_conf=""):
        programs = PROGRAMS[operator], OPERATORS[operator]
        for mode, program, size in product(("forward", "full"), programs, sizes):
            _time(program({**measured[0], "mode": mode, "x": str(size)}, config))
        found = {size: _median(PROGRAMS[operator]({**measured[0], "x": str(size)}, config))
                 for size in sizes}  # fmt: skip
    return [found[int(row["x"])] for row in measured]


def _time(call: Call) -> None:
    """Allocate what ``triton.testing.do_bench(call)`` does."""
    call()
    cache = torch.empty(TIMING_CACHE, dtype=torch.uint8, device="cuda")
    cache.zero_()
    call()


def table() -> Iterator[tuple[Row, float, bool]]:
    """Every row of the installed release, its simulated peak in MiB, and whether it is equal.

    The measurements are 32-bit floats, which hold every byte below 16 GiB only.
    """
    release = installed()
    measured = [
        row for row in rows(TABLE) if RELEASES.get((row["operator"], row["version"])) == release
    ]
    of_sequences: dict[str, list[Row]] = {}
    for row in measured:
        if row["operator"] in IN_SEQUENCE:
            of_sequences.setdefault(row["operator"], []).append(row)
        else:
            yield _compared(row, peak(row))
    for those in of_sequences.values():
        yield from map(_compared, those, peaks_in_sequence(those))


def _compared(row: Row, found: float) -> tuple[Row, float, bool]:
    return row, found, pack("f", float(row["peak_mib"])) == pack("f", found)


def main() -> None:
    """Print the rows of the installed release, or of each release in a folder."""
    folders = sys.argv[2:] if sys.argv[1:2] == ["--releases"] else []
    for folder in folders:
        path = os.pathsep.join([str(Path(folder).resolve()), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    if folders:
        return
    found = list(table())
    for row, simulated, same in found:
        names = (row["operator"], row["provider"], row["mode"], row["x"])
        said = "equal" if same else f"{simulated - float(row['peak_mib']):+.4f}"
        print(" ".join(names), row["peak_mib"], f"{simulated:.10g}", said)
    equal = sum(same for *_, same in found)
    print(f"liger-kernel {installed()}: {equal} of {len(found)} equal", flush=True)


if __name__ == "__main__":
    main()
