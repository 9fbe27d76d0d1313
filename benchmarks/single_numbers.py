"""Single numbers that others measured on real GPUs, against the same programs under simulation.

    python benchmarks/single_numbers.py

Each row names its source. ``exact`` rows were stated in bytes by the allocator itself; ``coarse``
ones came from a tool that also sees what lies outside the allocator (the CUDA context).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from producers import vision
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import find_gpu

MIB = 2**20


@dataclass(frozen=True)
class Number:
    """One measured number and the simulated one, both in ``unit``."""

    what: str
    source: str
    measured: float
    simulated: float
    unit: str
    note: str = ""
    digits: int = 0
    """Digits after the point that the source prints."""

    @property
    def off(self) -> float:
        """The distance of the simulated number, to the precision of the measured one."""
        return round(self.simulated, self.digits) / self.measured - 1

    def written(self, value: float) -> str:
        """One of the numbers as the source prints it."""
        return f"{value:,.{self.digits}f} {self.unit}"


# A matrix times a vector: discuss.pytorch.org/t/178671.


def matrix_vector() -> Iterator[Number]:
    """The segments after ``X @ W + b``."""
    source = "discuss.pytorch.org/t/178671"
    with simulate("A100-40GB", torch_version="2.6", alloc_conf=""):
        x = torch.rand(1000, 10, device="cuda")
        w = torch.rand(10, device="cuda")
        b = torch.rand(1000, device="cuda")
        before = torch.cuda.memory_reserved()
        y = x @ w + b
        after = torch.cuda.memory_reserved()
        segments = torch.cuda.memory_snapshot()
        largest = max(block["size"] for s in segments for block in s["blocks"] if _live(block))
        del y
    yield Number("reserved for three small tensors", source, 2 * MIB, before, "bytes")
    yield Number("segment that X @ W adds", source, 20 * MIB, after - before, "bytes")
    yield Number("block of the workspace in it", source, 8_519_680, largest, "bytes")


def _live(block: dict[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")


# ResNet-50 and three optimizers: tonghuikang/optimizer-memory-profiles 29ebcc76, profiling.py.


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters),
}
RESNET = {
    "SGD": (283_144_680, 111_570_920),
    "SGD with momentum": (389_571_048, 217_440_232),
    "Adam": (529_772_520, 320_983_016),
}
"""Highest and last bytes of the profiler's timeline: tensors that existed by their own sizes, what
came after by the sizes of blocks."""


def resnet_timelines() -> Iterator[Number]:
    """Ten steps of ResNet-50 with one image."""
    source = "tonghuikang/optimizer-memory-profiles, A10G"
    for name, (highest, last) in RESNET.items():
        with simulate("A10G", torch_version="2.6", alloc_conf=""):
            model = vision.resnet50().to("cuda")
            inputs = torch.randn(1, 3, 224, 224, device="cuda")
            labels = torch.rand_like(model(inputs))
            optimizer = OPTIMIZERS[name](model.parameters())
            measure = nn.CrossEntropyLoss()
            existing = [*model.parameters(), *model.buffers(), inputs, labels]
            base = sum(tensor.nbytes for tensor in existing) - torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(10):
                predicted = model(inputs)
                measure(predicted, labels).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            peak, final = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            del predicted
        yield Number(f"ResNet-50, {name}: highest", source, highest, base + peak, "bytes")
        yield Number(f"ResNet-50, {name}: last", source, last, base + final, "bytes")


# Megatron-LM's golden values.


def library_workspace() -> Iterator[Number]:
    """What Transformer Engine keeps for its own products, by GPU: the rest of the run is the same.

    Its sizes are those of transformer_engine.pytorch: 4 MiB, on Hopper 32 MiB and 1,024 bytes.
    """
    peaks = {}
    for gpu in ("A100-80GB", "H100"):
        with simulate(gpu, torch_version="2.6", alloc_conf=""):
            hopper = torch.cuda.get_device_capability() >= (9, 0)
            size = 32 * MIB + 1024 if hopper else 4 * MIB
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            peaks[gpu] = torch.cuda.max_memory_allocated()
            del workspace
    yield Number(
        "gpt3 12 layers: H100 minus A100",
        "Megatron-LM golden values",
        4_702_430_720 - 4_673_069_568,
        peaks["H100"] - peaks["A100-80GB"],
        "bytes",
        "the difference alone: Transformer Engine's own workspace",
    )


# xMem: NVML's highest minus its first sample. Loop, data and models are those of exp/trainer and
# perf_estimator of Stone-ResearchLife/xMem, the GPU is the one that its results name. Setting the
# memory fraction has created the context before sampling starts, and the sampler is a thread that
# still has to import and initialise NVML while the loop moves the model to the GPU. So the first
# sample has the context and, as the runs of ten models show, the model's segments.


@dataclass(frozen=True)
class Run:
    """One run of xMem's evaluation."""

    model: str
    optimizer: str
    batch: int
    measured_mib: int


LIBRARIES = "measured includes libraries loaded after the first sample"
STEPS = 4
TOTAL = 12_622_168_064
"""Bytes of the RTX 3060 as every row states them. Its driver keeps more than the one whose total
the simulation knows, and near the total a convolution whose workspace fails takes another way.
"""
XMEM = (
    Run("vgg16", "Adagrad", 480, 9_280),
    Run("vgg16", "Adam", 543, 10_616),
    Run("vgg16", "Adagrad", 551, 10_650),
    Run("vgg16", "AdamW", 560, 10_752),
    Run("resnet101", "SGD", 351, 8_076),
    Run("mobilenet_v2", "AdamW", 251, 3_956),
    Run("mobilenet_v2", "Adagrad", 317, 4_986),
    Run("mobilenet_v2", "AdamW", 638, 8_462),
    Run("mobilenet_v2", "SGD", 712, 9_588),
    Run("convnext_tiny", "AdamW", 200, 3_308),
    Run("convnext_tiny", "Adam", 282, 4_576),
    Run("convnext_tiny", "Adam", 355, 5_486),
    Run("convnext_tiny", "Adam", 420, 6_364),
)


def image_runs(runs: Iterable[Run] = XMEM) -> Iterator[Number]:
    """Steps at 86 x 86 pixels, gradients freed between forward and backward."""
    for run in runs:
        gpu = replace(find_gpu("RTX-3060"), total_memory=TOTAL)
        with simulate(gpu, torch_version="2.6", alloc_conf=""):
            model = vision.MODELS[run.model]().to("cuda").train()
            first = torch.cuda.memory_reserved()
            optimizer = getattr(torch.optim, run.optimizer)(model.parameters(), lr=1e-3)
            measure = nn.CrossEntropyLoss()
            for _ in range(STEPS):
                inputs = torch.zeros(run.batch, 3, 86, 86)
                labels = torch.zeros(run.batch, dtype=torch.long)
                inputs, labels = inputs.to("cuda"), labels.to("cuda")
                outputs = model(inputs)
                loss = measure(outputs, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                _, predicted = torch.max(outputs, 1)
            grown = torch.cuda.max_memory_reserved() - first
            del inputs, labels, outputs, loss, predicted
        yield Number(
            f"{run.model}, {run.optimizer}, batch {run.batch}",
            "xMem, RTX 3060, torch 2.6",
            run.measured_mib,
            grown / MIB,
            "MiB",
            LIBRARIES,
        )


def language_run() -> Iterator[Number]:
    """DistilGPT-2, batch 10 of 128 tokens, AdamW; needs transformers."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return
    with simulate("RTX-3060", torch_version="2.6", alloc_conf=""):
        model = GPT2LMHeadModel(GPT2Config(n_layer=6)).to("cuda").train()
        first = torch.cuda.memory_reserved()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            tokens = torch.zeros(10, 128, dtype=torch.long).to("cuda")
            mask = torch.ones(10, 128, dtype=torch.long).to("cuda")
            outputs = model(input_ids=tokens, attention_mask=mask, labels=tokens)
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
        grown = torch.cuda.max_memory_reserved() - first
        del tokens, mask, outputs
    yield Number(
        "distilgpt2, AdamW, batch 10",
        "xMem, RTX 3060, torch 2.6",
        3_014,
        grown / MIB,
        "MiB",
        LIBRARIES,
    )


def numbers() -> Iterator[Number]:
    """Every row."""
    for source in (matrix_vector, library_workspace, resnet_timelines, image_runs, language_run):
        yield from source()


def print_numbers(found: Iterable[Number]) -> None:
    """Print a table."""
    for number in found:
        print(
            f"{number.what:64} {number.written(number.measured):>22} "
            f"{number.written(number.simulated):>22} {number.off:+8.2%}  {number.note}",
            flush=True,
        )


if __name__ == "__main__":
    print_numbers(numbers())
