"""One simulated GPU: its catalogue entry, allocator and library workspaces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_gpumem.device.environment import Environment
from pytest_gpumem.simulated.allocator import Allocator, AllocatorSettings, OutOfMemory
from pytest_gpumem.simulated.callsite import current_stack
from pytest_gpumem.simulated.gpus import GpuModel, find_gpu
from pytest_gpumem.simulated.simulation import Simulation
from pytest_gpumem.simulated.workspaces import Version, Workspaces

OLDEST: Version = (2, 6)


class SimulatedGPU:
    """A CUDA device of ``model`` that computes shapes only.

    ``alloc_conf`` and ``cublas_workspace_config`` stand for PYTORCH_CUDA_ALLOC_CONF and
    CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment. ``torch_version`` (``"2.6"``) says
    whose rules the allocator and the workspaces follow; the default is the torch that runs.
    Raises ``ValueError`` for an unknown model, version or setting.
    """

    def __init__(
        self,
        model: str | GpuModel,
        *,
        alloc_conf: str | None = None,
        torch_version: str | None = None,
        cublas_workspace_config: str | None = None,
        index: int = 0,
    ) -> None:
        self.model = model if isinstance(model, GpuModel) else find_gpu(model)
        self.version = parse_version(torch_version)
        self.index = index
        self.stream = 0
        self.torch_device = torch.device("cuda", index)
        self.alloc_conf = _alloc_conf(self.version) if alloc_conf is None else alloc_conf
        self.cublas_workspace_config = (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
            if cublas_workspace_config is None
            else cublas_workspace_config
        )
        self.allocator: Memory = Memory(
            self.model.total_memory,
            settings=AllocatorSettings.parse(self.alloc_conf, version=self.version),
            version=self.version,
            device=index,
        )
        self.workspaces = Workspaces(
            self.allocator,
            self.version,
            self.model.compute_capability,
            self.cublas_workspace_config,
            lambda: torch._C._current_graph_task_id() != -1,
        )
        self.simulation = Simulation([self])

    @property
    def environment(self) -> Environment:
        """What the numbers of this device depend on."""
        major, minor = self.model.compute_capability
        return Environment(
            simulated=True,
            gpu=self.model.name,
            compute_capability=f"{major}.{minor}",
            torch=f"{self.version[0]}.{self.version[1]}",
            alloc_conf=self.alloc_conf,
            cublas_workspace_config=self.cublas_workspace_config,
        )

    @contextmanager
    def active(self) -> Iterator[SimulatedGPU]:
        """Serve ``cuda`` from this device."""
        with self.simulation.active():
            yield self

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that readers of the numbers have to know."""
        return tuple(self.simulation.notes)


class Memory(Allocator):
    """The caching allocator, with stacks, and torch's own exception when the GPU is full."""

    history = True
    """Whether allocations remember where in the code they were made."""

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes; raises ``torch.OutOfMemoryError``."""
        if context is None and self.history:
            context = current_stack()
        try:
            return super().malloc(size, stream, context)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None


def parse_version(text: str | None) -> Version:
    """``"2.6"`` or ``"2.11.0+cu130"`` -> ``(2, 6)``; ``None`` is the torch that runs."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__ if text is None else str(text))
    version = (int(found[1]), int(found[2])) if found else None
    if version is None or version < OLDEST:
        raise ValueError(
            f"torch_version={text!r} is not a release this simulation knows: "
            f'write 2.6 or later, as in torch_version="2.11"'
        )
    return version


def _alloc_conf(version: Version) -> str:
    # Up to 2.9 the CUDA allocator reads the first variable only; since 2.10 the first one set wins.
    names = ["PYTORCH_CUDA_ALLOC_CONF"]
    if version >= (2, 10):
        names += ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    return next((os.environ[name] for name in names if name in os.environ), "")
