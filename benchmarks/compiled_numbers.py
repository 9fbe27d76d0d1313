"""What others printed of code under torch.compile, against the same programs under simulation.

    python benchmarks/compiled_numbers.py [NAME...]

Inductor is that of the torch that runs here, the rules of the allocator and of workspaces are those
of the release measured. Each program runs compiled and eagerly, so that it can be seen how much of
a difference is the compiler's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from models import transformers
from producers.attention_sweeps import MIB, masked, masked_sweep, plain_sweep
from torch import nn
from torch._functorch import config as functorch_config

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import GpuModel


@dataclass(frozen=True)
class CompiledNumber:
    """A published measurement of compiled code; all numbers are in ``unit``."""

    what: str
    source: str
    measured: float
    simulated: float
    eager: float
    unit: str = "bytes"
    digits: int = 0
    """Digits after the point that the source prints."""
    note: str = ""

    @property
    def off(self) -> float:
        """The distance of the simulated number, to the precision of the measured one."""
        return round(self.simulated, self.digits) / self.measured - 1

    def written(self, value: float) -> str:
        """One of the numbers as the source prints it."""
        return f"{value:,.{self.digits}f} {self.unit}"


# Attention by hand: TianqGuo/MachineLearningNotes f0c52bac (H200; an H100's are the same),
# stanford-cs336/assignment2-systems/results/torch_compile_benchmarking/H200_results; torch 2.6 by
# the line numbers of its warnings. In MiB: before backward, peak compiled, peak not compiled.

PLAIN = {
    (16, 256): (66.50048828125, 68.7509765625, 72.6259765625),
    (16, 1024): (98.00048828125, 131.0009765625, 194.5009765625),
    (16, 4096): (584.00048828125, 1100.0009765625, 2122.0009765625),
    (16, 8192): (2128.00048828125, 4184.0009765625, 8276.0009765625),
    (16, 16384): (8288.00048828125, 16496.0009765625, 32872.0009765625),
    (32, 256): (67.00048828125, 69.5009765625, 73.2509765625),
    (32, 1024): (100.00048828125, 134.0009765625, 197.0009765625),
    (32, 4096): (592.00048828125, 1112.0009765625, 2132.0009765625),
    (32, 8192): (2144.00048828125, 4208.0009765625, 8296.0009765625),
    (32, 16384): (8320.00048828125, 16544.0009765625, 32912.0009765625),
    (64, 256): (68.00048828125, 71.0009765625, 74.5009765625),
    (64, 1024): (104.00048828125, 140.0009765625, 202.0009765625),
    (64, 4096): (608.00048828125, 1136.0009765625, 2152.0009765625),
    (64, 8192): (2176.00048828125, 4256.0009765625, 8336.0009765625),
    (64, 16384): (8384.00048828125, 16640.0009765625, 32992.0009765625),
    (128, 256): (70.00048828125, 74.0009765625, 77.0009765625),
    (128, 1024): (112.00048828125, 152.0009765625, 212.0009765625),
    (128, 4096): (640.00048828125, 1184.0009765625, 2192.0009765625),
    (128, 8192): (2240.00048828125, 4352.0009765625, 8416.0009765625),
    (128, 16384): (8512.00048828125, 33152.0009765625, 33152.0009765625),
}


def plain_attention() -> Iterator[CompiledNumber]:
    """Twenty sizes in one process, the last of them past the limit of recompilations."""
    source = "TianqGuo/MachineLearningNotes, H200, torch 2.6"
    found: dict[tuple[int, int], dict[bool, tuple[int, int]]] = {}
    with simulate("H200", torch_version="2.6", alloc_conf="", compile="always"):
        for width, length, compiled, before, peak in plain_sweep():
            found.setdefault((width, length), {})[compiled] = before, peak
    for (width, length), (stated_before, stated_peak, _) in PLAIN.items():
        what = f"attention, 8 x {length} x {width}"
        (before_eager, peak_eager), (before_here, peak_here) = (
            found[width, length][compiled] for compiled in (False, True)
        )
        yield CompiledNumber(
            f"{what}: before backward", source, stated_before * MIB, before_here, before_eager
        )
        yield CompiledNumber(f"{what}: peak", source, stated_peak * MIB, peak_here, peak_eager)


# The same with a mask and a softmax by hand: yyin-dev/cs336-a2 8ec54faf,
# data/attention_benchmark/compile.csv (and baseline.csv). The GPU is not named: two workspaces of
# 32 MiB are in all of them.

MASKED = (
    *(68.9692, 132.6255, 1118.5005, 4253.0005, 16762.0005),
    *(69.8442, 136.1255, 1132.5005, 4281.0005, 16818.0005),
    *(71.5942, 143.1255, 1160.5005, 4337.0005, 16930.0005),
    *(75.0942, 157.1255, 1216.5005, 4449.0005, 17154.0005),
)


def masked_attention() -> Iterator[CompiledNumber]:
    """Twenty sizes in one process: what is allocated after forward."""
    gpu = simulate("H100", torch_version="2.6", alloc_conf="", compile="always")
    with donated_buffers(False), gpu:
        compiled = list(masked_sweep(torch.compile(masked)))
    with simulate("H100", torch_version="2.6", alloc_conf=""):
        eager = list(masked_sweep(masked))
    for measured, (width, length, here), (*_, eagerly) in zip(MASKED, compiled, eager, strict=True):
        yield CompiledNumber(
            f"masked attention, 8 x {length} x {width}: after forward",
            "yyin-dev/cs336-a2, torch 2.6",
            measured,
            here / MIB,
            eagerly / MIB,
            "MiB",
            4,
        )


@contextmanager
def donated_buffers(value: bool) -> Iterator[None]:
    """Set donated buffers as the program does, which calls backward more than once."""
    with functorch_config.patch(donated_buffer=value):
        yield


# A small Llama under budgets of activation memory: pytorch/pytorch issue 197838, raw numbers in
# siddddd17/ackaudit 29d506f8, results/measured_backward; torch 2.14.0, GTX 1650 (4 GB), bytes.

GTX_1650 = GpuModel("GTX-1650", "NVIDIA GeForce GTX 1650", 4 * 2**30, (7, 5), 14, 1024, 2**20)
LLAMA_EAGER, LLAMA_RESIDENT = 1_642_860_544, 221_613_056
LLAMA = {
    0.05: 1_125_715_968,
    0.10: 805_578_752,
    0.15: 605_235_200,
    0.20: 636_676_096,
    0.30: 695_347_200,
}


def budgets(chosen: Iterable[float] = (0.15,)) -> Iterator[CompiledNumber]:
    """Peak allocated of a step of 32 layers, 1024 tokens, batch 2, with gradients already there."""
    source = "pytorch/pytorch issue 197838, GTX 1650, torch 2.14"
    with simulate(GTX_1650, torch_version="2.14", alloc_conf=""):
        eager, resident = llama_step(compiled=False)
    what = "Llama of 32 small layers"
    yield CompiledNumber(f"{what}: before a step", source, LLAMA_RESIDENT, resident, resident)
    note = "32,768 bytes less, not compiled as well: the release of transformers is not known"
    yield CompiledNumber(f"{what}: peak, eager", source, LLAMA_EAGER, eager, eager, note=note)
    for budget in chosen:
        with functorch_config.patch(activation_memory_budget=budget):
            torch._dynamo.reset()
            with simulate(GTX_1650, torch_version="2.14", alloc_conf="", compile="always"):
                peak, _ = llama_step(compiled=True)
        yield CompiledNumber(
            f"{what}, activation_memory_budget {budget}: peak",
            source,
            LLAMA[budget],
            peak,
            eager,
            note=note,
        )


class SmallLlama(nn.Module):
    """The sum of the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = transformers.LlamaModel(
            transformers.LlamaConfig(
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=32,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=1000,
                use_cache=False,
            )
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One number."""
        result: torch.Tensor = self.model(input_ids=ids).last_hidden_state.sum()
        return result


def llama_step(compiled: bool) -> tuple[int, int]:
    """Peak allocated of a step, and what was there before."""
    model: Any = SmallLlama().to("cuda")
    ids = torch.randint(0, 1000, (2, 1024)).to("cuda")
    step = torch.compile(model, dynamic=False) if compiled else model
    for _ in range(2):
        step(ids).backward()
        model.zero_grad(set_to_none=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(ids).backward()
    return torch.cuda.max_memory_allocated(), before


SOURCES: dict[str, Callable[[], Iterator[CompiledNumber]]] = {
    "plain": plain_attention,
    "masked": masked_attention,
    "budgets": budgets,
}


def compiled_numbers(names: Iterable[str] = ()) -> Iterator[CompiledNumber]:
    """The rows of the sources named; all but those that take minutes without names."""
    for name in [*names] or ("plain", "masked"):
        yield from SOURCES[name]()


if __name__ == "__main__":
    for found in compiled_numbers(sys.argv[1:]):
        print(
            f"{found.what:66} {found.written(found.measured):>24} "
            f"{found.written(found.simulated):>24} {found.off:+9.3%} "
            f"{found.written(found.eager):>24}  {found.note}",
            flush=True,
        )
