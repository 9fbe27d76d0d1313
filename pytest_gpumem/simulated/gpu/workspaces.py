"""cuBLAS and cuBLASLt workspaces: the live ones, and the effect of a matrix product on them.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp and Blas.cpp of each release (setWorkspaceForHandle,
getCurrentCUDABlasHandle, getCUDABlasLtWorkspace); the release binaries agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pytest_gpumem.simulated.common.callsite import provenance
from pytest_gpumem.simulated.gpu.releases import LT_SHARES, STATIC_SIZE
from pytest_gpumem.simulated.gpu.workspace_settings import (
    KEPT,
    SHARED,
    Version,
    WorkspaceSettings,
    default_workspace_bytes,
    lt_workspace_bytes,
    workspace_bytes,
)

__all__ = [
    "Memory",
    "Version",
    "Workspaces",
    "default_workspace_bytes",
    "lt_workspace_bytes",
    "workspace_bytes",
]


class Memory(Protocol):
    """The memory that a workspace is taken from: one device's allocator."""

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes, return the address."""
        ...

    def free(self, address: int) -> None:
        """Free the block at ``address``."""
        ...


@dataclass
class Workspaces:
    """The workspaces of one device: the live ones, and the effect of a GEMM on them."""

    memory: Memory
    version: Version
    capability: tuple[int, int]
    config: str | None
    """CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment where torch does."""
    in_autograd_thread: Callable[[], bool]
    """On a GPU the engine runs backward on a thread of its own, which has its own handle."""
    _kept: dict[tuple[object, int, str], tuple[int, int]] = field(default_factory=dict)
    """(handle, stream, library) -> (address, bytes)."""

    def __post_init__(self) -> None:
        self.settings = WorkspaceSettings(self.version, self.capability, self.config)

    @property
    def bytes(self) -> int:
        """Bytes of one cuBLAS workspace."""
        return self.settings.cublas_bytes

    def handle(self, stream: int = 0) -> None:
        """Get the handle, which keeps a workspace, unless operations have their own."""
        if not self.settings.per_operation:
            self._keep("cublas", stream)

    def reset_sizes(self) -> None:
        """``torch._C._cuda_resetCublasWorkspaceSize()``: read the environment again."""
        self._bytes = None

    def gemm(self, stream: int = 0) -> None:
        """Allocate for a cuBLAS call before the kernel runs, and keep the memory."""
        if self.settings.per_operation:
            self._temporary(self.bytes, stream)
        else:
            self._keep("cublas", stream)

    def gemm_lt(self, stream: int = 0) -> None:
        """Run a cuBLASLt call (``addmm`` with its bias in the epilogue)."""
        lifetime = self.settings.lt_lifetime
        if lifetime == SHARED:
            self._keep("cublas", stream)
        elif lifetime == KEPT:
            if self.version < LT_SHARES:
                self._keep("cublas", stream)
            self._keep("cublaslt", stream)
        elif self.settings.per_operation:
            self._temporary(self.settings.lt_bytes, stream)
        else:
            # The temporary is taken before the Lt handle, whose first use creates cuBLAS's.
            size = self.settings.lt_bytes
            address = self._take(size, stream) if size else 0
            self._keep("cublas", stream)
            if address:
                self.memory.free(address)

    def clear(self) -> None:
        """``torch._C._cuda_clearCublasWorkspaces()``."""
        for address, _ in self._kept.values():
            if address:
                self.memory.free(address)
        self._kept.clear()

    def clear_stream(self, stream: int) -> None:
        """Free memory of ``stream``: a CUDA graph captured there is reset (since 2.12)."""
        for key in [key for key in self._kept if key[1] == stream]:
            address, _ = self._kept.pop(key)
            if address:
                self.memory.free(address)

    @property
    def live(self) -> dict[int, int]:
        """Address -> bytes of every workspace that is kept."""
        return {address: size for address, size in self._kept.values() if address}

    def _handle(self) -> object:
        return "autograd" if self.in_autograd_thread() else threading.get_ident()

    def _keep(self, library: str, stream: int) -> None:
        key = (self._handle(), stream, library)
        kept = self._kept.get(key)
        if kept is not None and self.version < STATIC_SIZE:
            return
        settings = self.settings
        size = settings.cublas_bytes if library == "cublas" else settings.lt_bytes
        if kept is not None and kept[1] >= size:
            return
        self._kept[key] = (self._take(size, stream) if size else 0, size)
        # Since 2.13 a larger one takes its place, once it is allocated.
        if kept is not None and kept[0]:
            self.memory.free(kept[0])

    def _take(self, size: int, stream: int) -> int:
        context = provenance()
        context.library = "cuBLAS"
        return self.memory.malloc(size, stream, context)

    def _temporary(self, size: int, stream: int) -> None:
        if size:
            self.memory.free(self._take(size, stream))
