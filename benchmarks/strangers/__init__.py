"""Programs as strangers write them, run on the simulated device and on torch's own CUDA code.

A program is a function without arguments. Nothing in it knows of types: each runs once in each of
its ways, of which all but the first are set around it.

=====  ====================================================
f32    nothing is set
bf16   bfloat16 is the default type of new tensors
f16    float16 is
amp    autocast to bfloat16 is on
amp16  autocast to float16 is on
=====  ====================================================
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pytest_gpumem.values.world import World, world_of

EVERY = ("f32", "bf16", "f16", "amp")
MIXED = ("f32", "amp")
_MODULES = ("regimes", "shapes", "objectives", "models", "compiled", "ranks", "public")


@dataclass(frozen=True)
class Program:
    """A program, its ways, and the rank that it is."""

    name: str
    run: Callable[[], object]
    ways: tuple[str, ...] = EVERY
    world: World | None = None
    has_values: bool = False
    """Whether it goes by what a kernel computes, such as which expert takes a word."""
    is_compiled: bool = False
    """Whether it is run once before, which compiles: to compile has memory of its own."""


def programs() -> Iterator[Program]:
    """Yield every program that this environment can run."""
    for name in _MODULES:
        yield from importlib.import_module(f"strangers.{name}").programs()


def listed(*runs: Callable[[], object], ways: tuple[str, ...] = EVERY) -> Iterator[Program]:
    """Yield functions as programs of the same ways."""
    for run in runs:
        yield Program(run.__name__, run, ways)


def ranked(
    *runs: Callable[[], object], of: int, ways: tuple[str, ...] = MIXED
) -> Iterator[Program]:
    """Yield functions as programs of the first rank among so many."""
    for run in runs:
        yield Program(run.__name__, run, ways, world_of(of, 0, per_machine=of))


@contextlib.contextmanager
def set_way(way: str) -> Iterator[None]:
    """Run the body in a way."""
    types = {"bf16": torch.bfloat16, "f16": torch.float16}
    if way.startswith("amp"):
        with torch.autocast("cuda", dtype=types["f16" if way == "amp16" else "bf16"]):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(types.get(way, before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
