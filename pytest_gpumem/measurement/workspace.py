"""The sizes of cuBLAS workspaces."""

from __future__ import annotations

import os
from functools import cache

import torch

from pytest_gpumem.simulated.gpu.workspace_settings import (
    LARGE_BYTES,
    WorkspaceSettings,
    lt_workspace_bytes,
    workspace_bytes,
)


def possible_sizes(capability: tuple[int, int]) -> frozenset[int] | None:
    """Return the bytes that torch requests for a workspace on a GPU; ``None``: not known.

    Where torch reads ``CUBLAS_WORKSPACE_CONFIG`` once, this may be what makes it read the
    variable: call it where workspaces can have been allocated. None are known where every operation takes a workspace and returns it, as since 2.15.
    See :mod:`pytest_gpumem.simulated.gpu.workspaces`, which has the sources; not for ROCm.
    """
    if torch.version.hip is not None:
        return None
    if _per_operation():
        return frozenset()
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return _sizes(config, capability) | _set_by_code()


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
