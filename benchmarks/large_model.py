"""A training step of Llama-3-70B, shapes only: how long it takes and how that grows with layers.

``python benchmarks/large_model.py [--layers N ...] [--device dry]`` builds the model in bfloat16 on
one GPU that is large enough, simulated or torch's own CUDA code without kernels, and prints for
each number of layers the seconds of building, forward, backward and AdamW's step, and the memory of
the process. Wall-clock and processor time are both given: the first depends on what else the
machine does.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import on_device
import torch
import torch.nn.functional as F
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import GPUS

WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY = 8192, 64, 8, 28_672, 128_256
HEAD = WIDTH // HEADS
LAYERS = (10, 20, 40, 80)
LIMIT_SECONDS, LIMIT_MIB = 15, 2048


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (batch, heads, context, head)."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Attention(nn.Module):
    """Causal attention in which eight query heads share a key head."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        key, value = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        x = x + self.attention(self.norm1(x), cosine, sine)
        normed = self.norm2(x)
        mixed: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return mixed


class Llama(nn.Module):
    """Llama 3 as large as 70B: 70,553,706,496 parameters with 80 layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) -> logits (batch, context, vocabulary)."""
        x = self.tokens(tokens)
        angles = torch.zeros(tokens.shape[1], HEAD, device=tokens.device)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Clock:
    """Wall-clock seconds by part, and the processor's seconds of all."""

    parts: dict[str, float]
    started: float
    processor: float

    @classmethod
    def start(cls) -> Clock:
        """A clock that runs."""
        return cls({}, time.perf_counter(), time.process_time())

    def lap(self, part: str) -> None:
        """Charge what passed since the last lap to ``part``."""
        now = time.perf_counter()
        self.parts[part] = now - self.started
        self.started = now

    @property
    def total(self) -> float:
        """Seconds of all laps."""
        return sum(self.parts.values())


@contextmanager
def gpu_of(device: str | None) -> Iterator[Callable[[], int]]:
    """Have a GPU that is large enough inside; the value returns its peak in bytes."""
    if device is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        yield torch.cuda.max_memory_allocated
        return
    gpu_model = replace(GPUS["H100"], name="H100-2TiB", total_memory=2 * on_device.TIB)
    with simulate(gpu_model, alloc_conf="expandable_segments:True") as gpu:
        yield lambda: gpu.peak_allocated


def step(layers: int, context: int, device: str | None) -> tuple[Clock, int]:
    """Build the model and train one step; returns the times and the peak in bytes."""
    clock = Clock.start()
    with gpu_of(device) as peak:
        with torch.device("cuda"):
            model = Llama(layers).to(torch.bfloat16)
            tokens = torch.zeros(1, context, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        clock.lap("build")
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        clock.lap("step")
        highest = peak()
    clock.processor = time.process_time() - clock.processor
    return clock, highest


def _host_kib() -> int:
    """Return the peak memory of this process. ``ru_maxrss`` starts with that of its parent."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise OSError("the kernel does not report the most memory of a process")
    return int(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--context", type=int, default=4096)
    on_device.add_device(parser)
    settings = parser.parse_args()
    step(1, settings.context, settings.device)  # what torch imports and compiles at first use
    where = settings.device or "simulated"
    size = f"1 x {settings.context} tokens"
    print(f"Llama-3-70B, bfloat16, AdamW, {size}, torch {torch.__version__}, {where}")
    print(
        "layers   build  forward  backward    step   total  processor  per layer   host MiB  peak"
    )
    for layers in settings.layers:
        gc.collect()
        clock, peak = step(layers, settings.context, settings.device)
        mib = _host_kib() / 1024
        seconds = "  ".join(f"{s:7.2f}" for s in clock.parts.values())
        print(
            f"{layers:6} {seconds} {clock.total:7.2f} s {clock.processor:7.2f} s "
            f"{clock.processor / layers * 1000:7.1f} ms {mib:9.0f}  {peak / 1024**3:.1f} GiB"
        )
    print(f"the whole model has to stay below {LIMIT_SECONDS} s and {LIMIT_MIB} MiB on two cores")


if __name__ == "__main__":
    main()
