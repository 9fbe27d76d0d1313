"""cuBLAS and cuBLASLt workspaces, by torch version and compute capability.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp and Blas.cpp of each release
(parseChosenWorkspaceSize, getCurrentCUDABlasHandle, getCUDABlasLtWorkspace); the release binaries
agree.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pytest_gpumem.echo import quoted
from pytest_gpumem.simulated.callsite import provenance

Version = tuple[int, int]

DEFAULT_BYTES = 8_519_680
"""``:4096:2:16:8``: two blocks of 4096 KiB and eight of 16 KiB."""
LARGE_BYTES = 33_554_432
LT_BYTES = 1_048_576

_LARGE_MAJORS: tuple[tuple[Version, frozenset[int]], ...] = (
    # First release, compute capability majors whose default is LARGE_BYTES.
    ((2, 14), frozenset({9, 10, 11, 12})),
    ((2, 12), frozenset({9, 10, 12})),
)

SHARED = "shared"
"""Lt computes in the cuBLAS workspace of its handle and stream."""
KEPT = "kept"
"""Lt has a block of its own, kept for the rest of the process."""
TEMPORARY = "temporary"
"""Lt allocates a block for the call and frees it on return."""

_LT_LIFETIMES: tuple[tuple[Version, str], ...] = (
    ((2, 15), TEMPORARY),
    ((2, 12), SHARED),
    ((2, 9), KEPT),
    ((0, 0), TEMPORARY),
)


def default_workspace_bytes(version: Version, capability: tuple[int, int]) -> int:
    """Bytes of a cuBLAS workspace when CUBLAS_WORKSPACE_CONFIG is not set."""
    for since, majors in _LARGE_MAJORS:
        if version >= since:
            return LARGE_BYTES if capability[0] in majors else DEFAULT_BYTES
    # Up to 2.11 the test is for exactly 9.0, so Blackwell has the small one.
    return LARGE_BYTES if capability == (9, 0) else DEFAULT_BYTES


def workspace_bytes(config: str | None, version: Version, capability: tuple[int, int]) -> int:
    """Bytes of a cuBLAS workspace under a CUBLAS_WORKSPACE_CONFIG of ``:KiB:count`` pairs."""
    default = default_workspace_bytes(version, capability)
    if not config:
        return default
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if not pairs:
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG={quoted(config)} has no :SIZE:COUNT pair; "
            f"the default of {default:,} bytes is used",
            stacklevel=2,
        )
        return default
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs)


def lt_workspace_bytes(version: Version, cublas_bytes: int) -> int:
    """Bytes told to cuBLASLt; CUBLASLT_WORKSPACE_SIZE is in KiB."""
    text = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    if text.isdigit():
        return int(text) * 1024
    return cublas_bytes if version[:2] == (2, 12) else LT_BYTES


class Memory(Protocol):
    """What a workspace is taken from: one device's allocator."""

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes, return the address."""
        ...

    def free(self, address: int) -> None:
        """Free the block at ``address``."""
        ...


@dataclass
class Workspaces:
    """The workspaces of one device: which are live, and what a GEMM does to them."""

    memory: Memory
    version: Version
    capability: tuple[int, int]
    config: str | None
    """CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment at first use."""
    in_autograd_thread: Callable[[], bool]
    """On a GPU the engine runs backward on a thread of its own, which has its own handle."""
    _kept: dict[tuple[object, int, str], tuple[int, int]] = field(default_factory=dict)
    """(handle, stream, library) -> (address, bytes)."""

    def __post_init__(self) -> None:
        self._lt_lifetime = next(kind for since, kind in _LT_LIFETIMES if self.version >= since)
        # 2.15 takes a workspace per operation unless TORCH_CUBLAS_WORKSPACE_CACHE is 1.
        cached = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE", "0") not in ("", "0")
        self._per_operation = self.version >= (2, 15) and not cached
        if self.version >= (2, 15) and cached:
            self._lt_lifetime = SHARED
        if self.version >= (2, 8) and self.version < (2, 9):
            unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1"
            self._lt_lifetime = SHARED if unified else TEMPORARY
        self._bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of one cuBLAS workspace."""
        if self._bytes is None:
            config = self.config
            if config is None:
                config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            self._bytes = workspace_bytes(config, self.version, self.capability)
        return self._bytes

    def gemm(self, stream: int = 0) -> None:
        """A cuBLAS call: what it allocates before the kernel runs, and keeps."""
        if self._per_operation:
            self._temporary(self.bytes, stream)
        else:
            self._keep("cublas", self.bytes, stream)

    def gemm_lt(self, stream: int = 0) -> None:
        """A cuBLASLt call (``addmm`` with its bias in the epilogue)."""
        size = lt_workspace_bytes(self.version, self.bytes)
        if self._lt_lifetime == SHARED:
            self._keep("cublas", max(size, self.bytes), stream)
        elif self._lt_lifetime == KEPT:
            self._keep("cublas", self.bytes, stream)
            self._keep("cublaslt", size, stream)
        elif self._per_operation:
            self._temporary(size, stream)
        else:
            # The temporary is taken before the Lt handle, whose first use creates cuBLAS's.
            address = self._take(size, stream) if size else 0
            self._keep("cublas", self.bytes, stream)
            if address:
                self.memory.free(address)

    def clear(self) -> None:
        """``torch._C._cuda_clearCublasWorkspaces()``."""
        for address, _ in self._kept.values():
            if address:
                self.memory.free(address)
        self._kept.clear()

    def clear_stream(self, stream: int) -> None:
        """Free what belongs to ``stream``: a CUDA graph captured there is given up (since 2.12)."""
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

    def _keep(self, library: str, size: int, stream: int) -> None:
        key = (self._handle(), stream, library)
        kept = self._kept.get(key)
        if kept is not None:
            if kept[1] >= size or self.version < (2, 13):
                return
            # Since 2.13 a workspace is replaced when a larger one is asked for.
            if kept[0]:
                self.memory.free(kept[0])
        self._kept[key] = (self._take(size, stream) if size else 0, size)

    def _take(self, size: int, stream: int) -> int:
        context = provenance()
        context.library = "cuBLAS"
        return self.memory.malloc(size, stream, context)

    def _temporary(self, size: int, stream: int) -> None:
        if size:
            self.memory.free(self._take(size, stream))
