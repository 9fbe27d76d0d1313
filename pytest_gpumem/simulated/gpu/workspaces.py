"""cuBLAS and cuBLASLt workspaces: sizes, owners, and the effect of a matrix product on them.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp and Blas.cpp of each release (setWorkspaceForHandle,
getCurrentCUDABlasHandle, getCUDABlasLtWorkspace, parseChosenWorkspaceSize, getChosenWorkspaceSize,
getCUDABlasLtWorkspaceSize, unified_cublas_and_lt_workspaces), and up to 2.7 CUDABlas.cpp
(_parseChosenWorkspaceSize, _getWorkspaceSize) for Lt; the release binaries agree.

======== ======================= ======================= =========================================
torch    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_CUBLASLT_UNIFIED_WORKSPACE
======== ======================= ======================= =========================================
2.6, 2.7 at every use            at the first use        not known
2.8-2.10 at every use            at every use            at the first use; unset is off
2.11     at every use            at every use            as before; unset bounds Lt's size
2.12     at every use            at every use            at the first use; unset is on
2.13-    at the first use        at the first use        as before; from 2.15 on with
                                                         TORCH_CUBLAS_WORKSPACE_CACHE=1 alone
======== ======================= ======================= =========================================

Settings that torch reads at the first use are static: once for a process. The simulation reads
them once for a test and once for a ``simulate``, so a test does not depend on earlier ones.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.common.callsite import provenance
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.gpu.releases import (
    LARGE_MAJORS,
    LT_KEPT,
    LT_MAY_SHARE,
    LT_READ_EVERY_TIME,
    LT_SHARES,
    STATIC_SIZE,
    UNSET_IS_UNIFIED,
    WORKSPACE_PER_OPERATION,
)


def dropout_state_bytes(multiprocessors: int) -> int:
    """Return the bytes of cuDNN's state of dropout (``cudnnDropoutGetStatesSize``).

    48 bytes of ``curandStateXORWOW_t`` ("cuRAND", device API) for each of 1,024 threads of each
    multiprocessor: 6,488,064 on an H100 with cuDNN 9.19, and taken to hold for other GPUs.
    """
    return 48 * 1024 * multiprocessors


@dataclass
class Workspaces:
    """The workspaces of one device: the live ones, and the effect of a GEMM on them."""

    memory: Memory
    version: Version
    capability: tuple[int, int]
    config: str | None
    """CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment where torch does."""
    in_autograd_thread: Callable[[], bool]
    """Whether the caller is the engine's thread, which has its own handle on a GPU."""
    _kept: dict[tuple[object, int, str], tuple[int, int]] = field(default_factory=dict)
    """(handle, stream, library) -> (address, bytes)."""

    def __post_init__(self) -> None:
        self.settings = WorkspaceSettings(self.version, self.capability, self.config)

    def handle(self, stream: int = 0) -> None:
        """Get the handle, which keeps a workspace, unless each operation takes one."""
        if not self.settings.per_operation:
            self._keep("cublas", stream)

    def gemm(self, stream: int = 0) -> None:
        """Allocate for a cuBLAS call before the kernel runs, and keep the memory."""
        if self.settings.per_operation:
            self._free(self._take(self.settings.cublas_bytes, stream))
        else:
            self._keep("cublas", stream)

    def gemm_lt(self, stream: int = 0) -> None:
        """Run a cuBLASLt call (``addmm`` with its bias in the epilogue).

        Lt computes in the workspace of cuBLAS, in a block of its own that is kept, or in one for
        the time of the call.
        """
        if self.settings.per_operation:
            self._free(self._take(self.settings.lt_bytes, stream))
        elif self.settings.unified:
            self._keep("cublas", stream)
        elif self.version >= LT_KEPT:
            if self.version < LT_SHARES:
                self._keep("cublas", stream)
            self._keep("cublaslt", stream)
        else:
            # The temporary is taken before the Lt handle, whose first use creates cuBLAS's.
            address = self._take(self.settings.lt_bytes, stream)
            self._keep("cublas", stream)
            self._free(address)

    def clear(self) -> None:
        """``torch._C._cuda_clearCublasWorkspaces()``."""
        for address, _ in self._kept.values():
            self._free(address)
        self._kept.clear()

    def clear_stream(self, stream: int) -> None:
        """Free memory of ``stream``: a CUDA graph captured there is reset (since 2.12)."""
        for key in [key for key in self._kept if key[1] == stream]:
            self._free(self._kept.pop(key)[0])

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
        self._kept[key] = (self._take(size, stream), size)
        # Since 2.13 a larger one takes its place, once it is allocated.
        if kept is not None:
            self._free(kept[0])

    def _take(self, size: int, stream: int) -> int:
        """Allocate a workspace of ``size`` bytes; return its address, 0 if ``size`` is 0."""
        if not size:
            return 0
        context = provenance()
        context.library = "cuBLAS"
        return self.memory.malloc(size, stream, context)

    def _free(self, address: int) -> None:
        if address:
            self.memory.free(address)


T = TypeVar("T")

DEFAULT_BYTES = 8_519_680
"""``:4096:2:16:8``: two blocks of 4096 KiB and eight of 16 KiB."""
LARGE_BYTES = 33_554_432
LT_BYTES = 1_048_576


def default_workspace_bytes(version: Version, capability: tuple[int, int]) -> int:
    """Return the bytes of a cuBLAS workspace when CUBLAS_WORKSPACE_CONFIG is not set."""
    for since, majors in LARGE_MAJORS:
        if version >= since:
            return LARGE_BYTES if capability[0] in majors else DEFAULT_BYTES
    # Up to 2.11 the test is for exactly 9.0, so Blackwell has the small one.
    return LARGE_BYTES if capability == (9, 0) else DEFAULT_BYTES


def workspace_bytes(config: str | None, version: Version, capability: tuple[int, int]) -> int:
    """Return a cuBLAS workspace's bytes by a CUBLAS_WORKSPACE_CONFIG of ``:KiB:count`` pairs."""
    default = default_workspace_bytes(version, capability)
    if not config:
        return default
    pairs = re.findall(r":([0-9]{1,18}):([0-9]{1,18})", config)
    if not pairs:
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG={quoted(config)} has no :SIZE:COUNT pair; "
            f"the default of {default:,} bytes is used",
            stacklevel=2,
        )
        return default
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs)


def lt_workspace_bytes(version: Version, cublas_bytes: int) -> int:
    """Return cuBLASLt's bytes; CUBLASLT_WORKSPACE_SIZE is in KiB, and read as by std::stoi."""
    found = re.match(r"\s*\+?([0-9]{1,10})", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    if found and int(found[1]) < 1 << 31:
        return int(found[1]) * 1024
    return cublas_bytes if version[:2] == (2, 12) else LT_BYTES


class WorkspaceSettings:
    """Settings for the workspaces of one device.

    ``config`` stands for CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment, where torch does.
    """

    def __init__(self, version: Version, capability: tuple[int, int], config: str | None) -> None:
        self._version, self._capability, self._config = version, capability, config
        self._static: dict[str, Any] = {}
        self.chosen: dict[str, int] = {}
        """Bytes that ``torch._C._cuda_setCublasWorkspaceSize`` and its Lt twin set, by library."""

    def forget(self) -> None:
        """Reset to the state of a new process: nothing read, nothing set."""
        self._static.clear()
        self.chosen.clear()

    @property
    def cublas_bytes(self) -> int:
        """``getChosenWorkspaceSize``."""
        if "cublas" in self.chosen:
            return self.chosen["cublas"]
        return self._read("cublas", self._parsed, once=self._version >= STATIC_SIZE)

    @property
    def lt_bytes(self) -> int:
        """``getCUDABlasLtWorkspaceSize``: never more than the workspace that Lt may share."""

        def read() -> int:
            # 2.12 takes its default from cuBLAS's, unless the two have workspaces of their own.
            default = self._parsed() if self.unified else LT_BYTES
            return lt_workspace_bytes(self._version, default)

        once = not LT_READ_EVERY_TIME <= self._version < STATIC_SIZE
        size = self.chosen.get("cublaslt")
        if size is None:
            size = self._read("cublaslt", read, once=once)
        # 2.11 treats the unset variable as 1 here.
        is_unset = "TORCH_CUBLASLT_UNIFIED_WORKSPACE" not in os.environ
        is_bounded = (self._version == UNSET_IS_UNIFIED and is_unset) or self.unified
        return min(size, self.cublas_bytes) if is_bounded else size

    @property
    def per_operation(self) -> bool:
        """Whether every operation takes a workspace and returns it: since 2.15, unless cached."""
        return (
            self._version >= WORKSPACE_PER_OPERATION
            and self._flag("TORCH_CUBLAS_WORKSPACE_CACHE") is not True
        )

    @property
    def unified(self) -> bool:
        """Whether Lt computes in the cuBLAS workspace of its handle and stream."""
        if self._version < LT_MAY_SHARE or self.per_operation:
            return False
        flag = self._flag("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        return flag is not False if self._version >= LT_SHARES else flag is True

    def _parsed(self) -> int:
        variable = "CUBLAS_WORKSPACE_CONFIG"
        config = os.environ.get(variable) if self._config is None else self._config
        return workspace_bytes(config, self._version, self._capability)

    def _flag(self, name: str) -> bool | None:
        """Return the value of a variable as ``c10::utils::check_env`` does: only 0 and 1 count."""
        flags = {"0": False, "1": True}
        return self._read(name, lambda: flags.get(os.environ.get(name, "")), once=True)

    def _read(self, name: str, read: Callable[[], T], *, once: bool) -> T:
        if not once:
            return read()
        if name not in self._static:
            self._static[name] = read()
        value: T = self._static[name]
        return value
