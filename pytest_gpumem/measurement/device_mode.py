"""The partition of a device, its permitted users, and the part of it this container may use.

The driver reports MIG, vGPU, compute modes, MPS and memory limits of cgroups; HAMi and cGPU use
variables of the container's environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.sizes import GIB, format_size
from pytest_gpumem.values.serialization import Plain

MPS_DIRECTORY = "/tmp/nvidia-mps"
"""The directory of MPS's pipes unless CUDA_MPS_PIPE_DIRECTORY names another (NVIDIA's MPS guide,
"Appendix: Environment Variables")."""
_MPS_PID = "nvidia-cuda-mps-control.pid"

_HAMI = "CUDA_DEVICE_MEMORY_LIMIT"
_HAMI_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class NvmlMode(Plain):
    """The partition of a device and the processes that may use it."""

    mig_profile: str | None = None
    """``1g.5gb``; empty for a MIG instance whose name lacks it; ``None`` for a whole GPU."""
    vgpu: bool = False
    mps: bool = False
    exclusive_process: bool = False
    """Whether only one process at a time may have a context; under MPS, that is its server."""
    prohibited: bool = False
    """Whether no process may have a context."""
    limited_by: str | None = None
    """The software that limits this container's part: ``HAMi``, ``cGPU`` or ``cgroup``."""
    limit: int | None = None
    """The bytes of that part."""

    @property
    def partition(self) -> str:
        """The mode that numbers may depend on: ``MIG-1g.5gb``, ``vGPU``, ``MPS`` or a combination.

        Empty for a whole device in its default mode. The size of a limit is not part of it: the
        allocator's numbers do not depend on the amount of memory.
        """
        parts = (
            None if self.mig_profile is None else f"MIG-{self.mig_profile}".rstrip("-"),
            self.vgpu and "vGPU",
            self.mps and "MPS",
            self.is_exclusive and "exclusive",
            self.limited_by,
        )
        return "-".join(part for part in parts if part)

    @property
    def is_exclusive(self) -> bool:
        """Whether a second process could not use it."""
        return self.exclusive_process and not self.mps

    @property
    def words(self) -> tuple[str, ...]:
        """The mode in words for a reader; empty for a whole device in its default mode."""
        limit = "" if self.limit is None else f" leaves {format_size(self.limit)}"
        words = (
            None if self.mig_profile is None else f"MIG {self.mig_profile}".rstrip(),
            self.vgpu and "vGPU",
            self.mps and "MPS",
            self.exclusive_process and "exclusive-process mode",
            self.prohibited and "compute mode prohibited",
            self.limited_by and f"{self.limited_by}{limit}",
        )
        return tuple(word for word in words if word)


def mps_daemon_runs(environ: Mapping[str, str]) -> bool:
    """Return whether processes with this environment would be clients of MPS.

    They are if CUDA_MPS_PIPE_DIRECTORY is set, or if the process in the daemon's PID file runs.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in environ:
        return True
    try:
        pid = int(Path(MPS_DIRECTORY, _MPS_PID).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    import psutil

    # Not os.kill(pid, 0): on Windows that sends Ctrl-C instead of only testing the process.
    return bool(psutil.pid_exists(pid))


def container_limit(
    environ: Mapping[str, str], index: int, total: int
) -> tuple[str, int | None] | None:
    """Return the name and bytes of the limit on this container's part of NVML's device ``index``.

    ``total`` are the bytes that NVML reports. ``None`` where neither HAMi nor cGPU limits it.
    """
    if hami := _hami_limit(environ, index):
        return "HAMi", hami
    if any(name.startswith("CUDA_DEVICE_SM_LIMIT") for name in environ):
        return "HAMi", None  # HAMi limits the container's compute time, not its memory
    cgpu = _cgpu_limit(environ, total)
    return None if cgpu is None else ("cGPU", cgpu)


def _hami_limit(environ: Mapping[str, str], index: int) -> int | None:
    """Return the bytes by HAMi-core's rule: the device's own variable, else that of all; 0 is none.

    Source: HAMi-core's README and src/multiprocess/multiprocess_memory_limit.c,
    do_init_device_memory_limits; its indices are NVML's.
    """
    for name in (f"{_HAMI}_{index}", _HAMI):
        found = re.fullmatch(r"\s*(\d+)([kKmMgG]?)\s*", environ.get(name, ""))
        if found and int(found[1]):
            return int(found[1]) * _HAMI_UNITS[found[2].lower()]
    return None


def _cgpu_limit(environ: Mapping[str, str], total: int) -> int | None:
    """Return the bytes by Alibaba's cGPU, whose variables give the container's GiB of the card.

    Source: Alibaba Cloud, "Use Docker to install and use cGPU": CGPU_DISABLE switches it off, and
    without ALIYUN_COM_GPU_MEM_CONTAINER it does not start. NVML in the container shows only the
    part, or the whole card where only the scheduler uses the variables.
    """
    if environ.get("CGPU_DISABLE", "").lower() in ("1", "true"):
        return None
    part, whole = (
        int(value) if (value := environ.get(f"ALIYUN_COM_GPU_MEM_{name}", "")).isdecimal() else 0
        for name in ("CONTAINER", "DEV")
    )
    if not part:
        return None
    if total <= part * GIB or whole < part:
        return min(total, part * GIB)
    return round(total * part / whole)
