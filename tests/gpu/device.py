"""The CUDA device under test: a GPU, the dry device, or the simulated one in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.allocator.blocks import MIN_BLOCK
from pytest_gpumem.simulated.gpu.device import parse_version
from pytest_gpumem.simulated.gpu.workspaces import Workspaces
from pytest_gpumem.simulating import simulate

VARIABLE = "GPUMEM_TEST_DEVICE"
STAND_IN = "A100-40GB"


def _asked() -> tuple[str, str]:
    """Return which kind of device is to be tested, and its model."""
    kind, _, model = os.environ.get(VARIABLE, "").partition(":")
    if kind not in ("", "sim", "dry"):
        raise ValueError(f"{VARIABLE}={kind}: write sim, dry, sim:MODEL, dry:MODEL or nothing")
    return kind, model or STAND_IN


def stands_in() -> str | None:
    """Return the model of the simulated device, ``None`` where ``torch.cuda`` itself is tested."""
    kind, model = _asked()
    return model if kind == "sim" else None


def is_dry() -> bool:
    """Return whether the device under test is the dry one, which has neither context nor time."""
    return _asked()[0] == "dry"


def missing() -> str | None:
    """Return why there is nothing to test; ``None`` where there is a device."""
    if stands_in() is not None or torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no CUDA device ({VARIABLE}=sim simulates one)"


@contextmanager
def device_under_test() -> Iterator[None]:
    """Make ``cuda`` available inside, with an empty cache and no workspaces."""
    model = stands_in()
    if model is not None:
        with simulate(model):
            yield
        return
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


class _Counting:
    """An allocator that only records sizes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next = MIN_BLOCK

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        address = self._next
        self._next += size + MIN_BLOCK
        self.sizes[address] = size
        return address

    def free(self, address: int) -> None:
        del self.sizes[address]


def kept_workspaces() -> set[int]:
    """Return the bytes of workspaces that one thread's products keep: of cuBLAS or cuBLASLt."""
    properties = torch.cuda.get_device_properties(0)
    found = set()
    for product in ("gemm", "gemm_lt"):
        memory: Any = _Counting()
        workspaces = Workspaces(
            memory,
            parse_version(None),
            (properties.major, properties.minor),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            lambda: False,
        )
        getattr(workspaces, product)()
        found.add(sum(memory.sizes.values()))
    return found
