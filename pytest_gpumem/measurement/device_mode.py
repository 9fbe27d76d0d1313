"""How a device is divided, who may use it, and how much of it this container may have.

The driver tells of MIG, vGPU, compute modes, MPS and memory limits of cgroups; HAMi and cGPU tell
by variables of the container's environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.sizes import GIB, format_size

MPS_DIRECTORY = "/tmp/nvidia-mps"
"""Where MPS meets its clients unless CUDA_MPS_PIPE_DIRECTORY says otherwise (NVIDIA's MPS guide,
"Appendix: Environment Variables")."""
_MPS_PID = "nvidia-cuda-mps-control.pid"

_HAMI = "CUDA_DEVICE_MEMORY_LIMIT"
_HAMI_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class NvmlMode:
    """How the device is divided and who may use it."""

    mig_profile: str | None = None
    """``1g.5gb``; empty for a MIG instance whose name does not tell; ``None`` for a whole GPU."""
    vgpu: bool = False
    mps: bool = False
    exclusive_process: bool = False
    """One process at a time may have a context; under MPS its server is that process."""
    prohibited: bool = False
    """No process may have a context."""
    limited_by: str | None = None
    """What limits this container's part of the device: ``HAMi``, ``cGPU`` or ``cgroup``."""
    limit: int | None = None
    """Bytes of that part."""

    @property
    def partition(self) -> str:
        """What of it numbers may depend on: ``MIG-1g.5gb``, ``vGPU``, ``MPS`` or a combination.

        Empty for a whole device in its default mode. A limit counts without its size: the
        allocator's numbers do not depend on what it may not have.
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
        """What a person is told of it; nothing of a whole device in its default mode."""
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
    """Whether processes of this environment would be clients of MPS.

    Where CUDA_MPS_PIPE_DIRECTORY is set, somebody wants them to be; else by the daemon's PID file.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in environ:
        return True
    try:
        pid = int(Path(MPS_DIRECTORY, _MPS_PID).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    import psutil

    # Not os.kill(pid, 0), which only asks under Linux and macOS: Windows sends Ctrl-C.
    return bool(psutil.pid_exists(pid))


def container_limit(
    environ: Mapping[str, str], index: int, total: int
) -> tuple[str, int | None] | None:
    """Return who limits this container's part of NVML's device ``index``, and to how many bytes.

    ``total`` are those that NVML shows of it. ``None`` where neither HAMi nor cGPU does.
    """
    if hami := _hami_limit(environ, index):
        return "HAMi", hami
    if any(name.startswith("CUDA_DEVICE_SM_LIMIT") for name in environ):
        return "HAMi", None  # the container has the whole memory and a part of the time
    limit = _cgpu_limit(environ, total)
    return None if limit is None else ("cGPU", limit)


def _hami_limit(environ: Mapping[str, str], index: int) -> int | None:
    """Bytes by HAMi-core's rule: the device's own variable, else that of all; 0 is no limit.

    Source: HAMi-core's README and src/multiprocess/multiprocess_memory_limit.c,
    do_init_device_memory_limits; its indices are NVML's.
    """
    for name in (f"{_HAMI}_{index}", _HAMI):
        found = re.fullmatch(r"\s*(\d+)([kKmMgG]?)\s*", environ.get(name, ""))
        if found and int(found[1]):
            return int(found[1]) * _HAMI_UNITS[found[2].lower()]
    return None


def _cgpu_limit(environ: Mapping[str, str], total: int) -> int | None:
    """Bytes by Alibaba's cGPU: so many of the so many GiB that its variables divide the card into.

    Source: Alibaba Cloud, "Use Docker to install and use cGPU": CGPU_DISABLE switches it off, and
    without ALIYUN_COM_GPU_MEM_CONTAINER it does not start. NVML in the container shows the part
    alone, or the whole card where only the scheduler goes by the variables.
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
