"""The environment that a number depends on, which keys baselines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

from pytest_gpumem.values.serialization import OMITTED, Plain


def alloc_conf_of_process(version: tuple[int, int]) -> str:
    """Return the setting that the CUDA allocator of torch ``version`` reads, empty for none.

    Source: c10/core/AllocatorConfig.cpp; up to 2.9 CUDAAllocatorConfig.cpp read only the first.
    """
    return os.environ.get(alloc_conf_variable(version), "")


def alloc_conf_variable(version: tuple[int, int]) -> str:
    """Return the name of the variable that :func:`alloc_conf_of_process` reads."""
    names = ["PYTORCH_CUDA_ALLOC_CONF"]
    if version >= (2, 10):
        names += ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    return next((name for name in names if name in os.environ), names[0])


_PLAIN_SETTINGS = re.compile(r"[a-z_]+:[A-Za-z0-9_.]+(,[a-z_]+:[A-Za-z0-9_.]+)*")
"""Settings that are part of a folder's name unchanged, except for the colon (Windows)."""
_MOST_SETTINGS = 100
"""Characters of settings in the name of a folder."""
KINDS = ("sim", "dry", "cuda")
"""First words of :attr:`Environment.key`."""
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.]{1,40}")
"""Other plugins' words that are part of a folder's name unchanged; others are hashed."""


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Environment(Plain):
    """The environment in which a number was measured.

    ``driver`` is recorded for the reader but does not enter :attr:`key`: the caching allocator's
    numbers do not depend on it, and a driver update must not orphan every baseline.
    """

    simulated: bool
    gpu: str
    """Catalogue name when simulated or dry (``A100-40GB``), else the driver's name."""
    compute_capability: str
    torch: str
    """The release, ``major.minor``, on which the allocator's rules depend."""
    cuda: str | None = None
    driver: str | None = None
    alloc_conf: str = ""
    """PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, whichever the allocator reads."""
    cublas_workspace_config: str = ""
    """CUBLAS_WORKSPACE_CONFIG; empty for the library's default."""
    partition: str = ""
    """MIG profile, MPS, vGPU or exclusive mode, HAMi, cGPU or cgroup; empty for a whole device."""
    ranks: str = field(default="", metadata=OMITTED)
    """The rank among several, as ``rank 3 of 8``; empty for a single process."""
    dry: bool = field(default=False, metadata=OMITTED)
    """Whether torch's own CUDA code ran without a GPU, over a runtime whose kernels do nothing."""
    extra: tuple[tuple[str, str], ...] = field(default=(), metadata=OMITTED)
    """The entries that other plugins add: names and words that numbers depend on, sorted."""

    @cached_property
    def key(self) -> str:
        """Folder name of this environment's baselines."""
        kind = "sim" if self.simulated else "dry" if self.dry else "cuda"
        parts = [kind, self.gpu, f"torch{self.torch}"]
        if self.cuda and not self.is_exact:
            parts.append(f"cu{self.cuda}")
        if self.partition:
            parts.append(self.partition)
        if self.ranks:
            parts.append(self.ranks.replace(" ", ""))
        key = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))
        words = (
            f"{name}={word if _PLAIN_WORD.fullmatch(word) else _hash(word)}"
            for name, word in self.extra
        )
        return "-".join([key, *self._settings(), *words])

    @property
    def is_exact(self) -> bool:
        """Whether its numbers repeat byte for byte, because no other program affects them."""
        return self.simulated or self.dry

    @property
    def kind(self) -> str:
        """The word before the GPU's name wherever its numbers are shown."""
        return "simulated " if self.simulated else "dry " if self.dry else ""

    def _settings(self) -> Iterator[str]:
        """Yield the settings as parts of a folder's name, hashed if a name cannot contain them."""
        conf, config = self.alloc_conf, self.cublas_workspace_config
        plain = not conf or _PLAIN_SETTINGS.fullmatch(conf)
        plain = plain and (not config or re.fullmatch(r"(:\d+)+", config))
        if not plain or len(conf) + len(config) > _MOST_SETTINGS:
            yield "conf" + _hash(f"{conf}\0{config}")
            return
        if conf:
            yield conf.replace(":", "=")
        if config:
            yield f"cublas{config.replace(':', '=')}"

    def with_extra(self, extra: Mapping[str, str]) -> Environment:
        """Return the environment with the entries of other plugins replaced by ``extra``."""
        return replace(self, extra=tuple(sorted(extra.items())))
