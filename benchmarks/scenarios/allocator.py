"""The allocator under its settings: churn, training, growing lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from training_step import Gpt2

from scenarios import Scenario
from scenarios.networks import trained, words

KIB, MIB = 1 << 10, 1 << 20

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "garbage_collection_threshold:0.6",
    "max_split_size_mb:64,garbage_collection_threshold:0.8",
)


def churn(seed: int, largest: int) -> list[Any]:
    """Allocate and free sizes of every order, in an order that a seed decides."""
    choice = random.Random(seed)
    alive: list[torch.Tensor] = []
    for _ in range(800):
        if alive and choice.random() < 0.45:
            alive.pop(choice.randrange(len(alive)))
        size = int(2 ** choice.uniform(0, largest.bit_length()))
        alive.append(torch.empty(min(size, largest), dtype=torch.uint8, device="cuda"))
    return alive


def growing() -> list[Any]:
    """Keep a cache that is copied into a larger one at every length."""
    cache = torch.empty(8, 16, 1, 64, device="cuda")
    for _ in range(200):
        new = torch.empty(8, 16, 1, 64, device="cuda")
        cache = torch.cat([cache, new], 2)
    return [cache]


def released() -> list[Any]:
    """Give the cache back in between."""
    kept = []
    for size in (3 * MIB, 30 * MIB, 300 * KIB, 12 * MIB):
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(5)]
        kept.append(blocks[2])
        del blocks
        torch.cuda.empty_cache()
    return kept


def scenarios() -> Iterator[Scenario]:
    """Yield every program under every setting."""
    programs: dict[str, Any] = {
        "churn small": partial(churn, 1, MIB),
        "churn large": partial(churn, 2, 64 * MIB),
        "growing": growing,
        "released": released,
        "training": trained(partial(Gpt2, 2), words(2, 256, 50_257)),
    }
    for setting in SETTINGS:
        for name, run in programs.items():
            shown = f"allocator/{name} {setting}".strip()
            yield Scenario(shown, run, __name__, alloc_conf=setting)
