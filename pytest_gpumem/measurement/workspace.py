"""The sizes of cuBLAS workspaces."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from pytest_gpumem.simulated.gpu.workspace_settings import (
    LARGE_BYTES,
    WorkspaceSettings,
    lt_workspace_bytes,
    workspace_bytes,
)


def possible_sizes(device: int) -> frozenset[int] | None:
    """Return the bytes that torch requests for a workspace on ``device``; ``None``: not known.

    None are known where every operation takes a workspace and returns it, as since 2.15.
    See :mod:`pytest_gpumem.simulated.gpu.workspaces`, which has the sources; not for ROCm.
    """
    if torch.version.hip is not None:
        return None
    if _per_operation():
        return frozenset()
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # Not get_device_capability(), which asks for the number of devices: a fixture that is set up
    # meanwhile would be taken to depend on it.
    found: Any = torch.cuda._get_device_properties(device)  # type: ignore[attr-defined]  # C++ sets it
    return _sizes(config, (found.major, found.minor)) | _set_by_code()


@cache
def _per_operation() -> bool:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return WorkspaceSettings((version[0], version[1]), (0, 0), None).per_operation


def _set_by_code() -> set[int]:
    """Return the sizes that 2.13 and later report, which code may set (torch.backends.cuda)."""
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    return {getattr(torch._C, name)() for name in names if hasattr(torch._C, name)}


@cache
def _sizes(config: str | None, capability: tuple[int, int]) -> frozenset[int]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    ours = workspace_bytes(config, (major, minor), capability)
    # 2.14 lists more GPUs with the large one than earlier releases: a size too many
    # costs nothing, one too few would count a workspace as something else.
    return frozenset({ours, lt_workspace_bytes((major, minor), ours), LARGE_BYTES})
