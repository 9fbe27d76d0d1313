"""What a generated wrapper finds: memory of the simulated GPU, and kernels that do nothing.

Inductor makes a module of Python for each graph. It takes memory from ``_empty_strided_cuda``,
calls libraries through ATen's operators, and gets its Triton kernels from ``AsyncCompile``, as
source. Source: torch/_inductor/codegen/wrapper.py and async_compile.py, torch 2.9 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def plan(machine: SimulatedMachine, patches: Patches) -> None:
    """List what wrappers are to find while they are loaded."""
    patches.plan(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided)
    patches.plan(AsyncCompile, "triton", _load_kernel)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # Looked up when it is called: a wrapper outlives the simulation that it was made in.
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _load_kernel(_: AsyncCompile, name: str, source: str, **__: Any) -> Kernel:
    return Kernel(name, source)


class Kernel:
    """A Triton kernel of Inductor's: its launch writes what nobody computes."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._source = source

    def run(self, *args: Any, stream: Any = None, **options: Any) -> None:
        """Launch it."""

    @cached_property
    def _outputs(self) -> list[int]:
        """The positions of the arguments that it writes to."""
        found = re.search(rf"^def {re.escape(self.name)}\\(([^)]*)\\)", self._source, re.MULTILINE)
        names = found[1].split(",") if found else []
        return [at for at, name in enumerate(names) if name.strip().startswith(_WRITTEN)]


_WRITTEN = ("out_ptr", "in_out_ptr")
