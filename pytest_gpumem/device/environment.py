"""What a number depends on: the environment that keys baselines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any


def alloc_conf_of_process(version: tuple[int, int]) -> str:
    """Return the setting that the CUDA allocator of torch ``version`` reads, empty for none.

    Source: c10/core/AllocatorConfig.cpp; up to 2.9 CUDAAllocatorConfig.cpp read the first alone.
    """
    return os.environ.get(alloc_conf_variable(version), "")


def alloc_conf_variable(version: tuple[int, int]) -> str:
    """Return the name of the variable that :func:`alloc_conf_of_process` reads."""
    names = ["PYTORCH_CUDA_ALLOC_CONF"]
    if version >= (2, 10):
        names += ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    return next((name for name in names if name in os.environ), names[0])


@dataclass(frozen=True)
class Environment:
    """Where a number was measured.

    ``driver`` is recorded for the reader but does not enter :attr:`key`: the caching allocator's
    numbers do not depend on it, and a driver update must not orphan every baseline.
    """

    simulated: bool
    gpu: str
    """Catalogue name when simulated (``A100-40GB``), else the driver's name of the device."""
    compute_capability: str
    torch: str
    """Release, ``major.minor``: what the allocator's rules depend on."""
    cuda: str | None = None
    driver: str | None = None
    alloc_conf: str = ""
    """PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, whichever the allocator reads."""
    cublas_workspace_config: str = ""
    """CUBLAS_WORKSPACE_CONFIG; empty for the library's default."""
    partition: str = ""
    """MIG profile, MPS or vGPU mode; empty for a whole device of its own."""

    @cached_property
    def key(self) -> str:
        """Folder name of this environment's baselines."""
        kind = "sim" if self.simulated else "cuda"
        parts = [kind, self.gpu, f"torch{self.torch}"]
        if self.cuda and not self.simulated:
            parts.append(f"cu{self.cuda}")
        if self.partition:
            parts.append(self.partition)
        settings = "\0".join((self.alloc_conf, self.cublas_workspace_config))
        if settings != "\0":
            parts.append("conf" + sha256(settings.encode()).hexdigest()[:8])
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        """Rebuild what :meth:`to_dict` wrote."""
        return cls(**data)
