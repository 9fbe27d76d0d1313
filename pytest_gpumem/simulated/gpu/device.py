"""One simulated GPU: its catalogue entry, allocator and library workspaces."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.allocator import AllocatorError, AllocatorSettings
from pytest_gpumem.allocator.device_memory import (
    DEVICE_ADDRESSES,
    FIRST_ADDRESS,
    DriverAddresses,
    SharedDevice,
)
from pytest_gpumem.allocator.releases import OLDEST, Version
from pytest_gpumem.allocator.trace import Timeline
from pytest_gpumem.garbage import Collector
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.common.callsite import provenance
from pytest_gpumem.simulated.gpu.catalogue import GpuModel
from pytest_gpumem.simulated.gpu.estimates import Estimates
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.gpu.workspaces import Workspaces, dropout_state_bytes
from pytest_gpumem.values.environment import alloc_conf_of_process, alloc_conf_variable


class GpuState:
    """A single CUDA device of ``model``: its memory, and the state of torch and its libraries.

    ``alloc_conf`` and ``cublas_workspace_config`` stand for PYTORCH_CUDA_ALLOC_CONF and
    CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment, the second where torch reads it: see
    :mod:`~pytest_gpumem.simulated.gpu.workspaces`. ``torch_version`` (``"2.6"``) is the
    release whose rules the allocator and the workspaces follow; the default is the torch that runs.
    Raises ``ValueError`` for an unknown version or setting.
    """

    def __init__(
        self,
        model: GpuModel,
        *,
        alloc_conf: str | None = None,
        torch_version: str | None = None,
        cublas_workspace_config: str | None = None,
        index: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        self.model = model
        self.version = parse_version(torch_version)
        self.index = index
        self.timeline = Timeline() if timeline is None else timeline
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
            raise AllocatorError(
                "PYTORCH_NO_CUDA_MEMORY_CACHING=1 takes memory past the allocator that is "
                "simulated: unset it"
            )
        self.torch_device = torch.device("cuda", index)
        self.alloc_conf = alloc_conf_of_process(self.version) if alloc_conf is None else alloc_conf
        self._workspace_config = cublas_workspace_config
        """``None`` where the environment sets it, which code under test may change."""
        self.cublas_workspace_config = (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
            if cublas_workspace_config is None
            else cublas_workspace_config
        )
        try:
            self._settings = AllocatorSettings.parse(self.alloc_conf, version=self.version)
            memory = self.empty_memory(index)
        except AllocatorError as error:
            if alloc_conf is not None:
                raise
            name = alloc_conf_variable(self.version)
            raise AllocatorError(
                f"{name}={quoted(self.alloc_conf)} cannot be used: {str(error).rstrip('.')}; "
                "write it as torch reads it, or unset it"
            ) from error
        self._own_workspaces = self.workspaces_in(memory)
        self.leftover_workspaces: Callable[[], Workspaces | None] | None = None
        """Returns the workspaces of the calling thread if an earlier test has left it running."""
        self.shared: SharedDevice | None = None
        """Memory that other processes allocate from too; ``None`` for a device of one process."""
        self._collector: Collector | None = None
        self.estimates = Estimates(memory)
        self.calls_without_workspace: set[object] = set()
        """Calls of cuDNN whose workspace once did not fit: later ones use none."""
        self.dropout_state = 0
        """Address of the state of recurrent layers' dropout; 0 for none."""

    @property
    def stream(self) -> int:
        """The handle of the stream that work goes to now: by default the default stream."""
        return 0

    @property
    def workspaces(self) -> Workspaces:
        """The libraries' workspaces of the calling thread."""
        return (self.leftover_workspaces and self.leftover_workspaces()) or self._own_workspaces

    @property
    def allocator(self) -> Memory:
        """The memory of the calling thread."""
        return self.workspaces.memory

    def share(self, shared: SharedDevice | None) -> None:
        """Take memory from ``shared`` from now on; memory held already is not counted there."""
        self.shared = shared
        self.allocator.memory.shared = shared

    def restart_collector(self, collector: Collector) -> None:
        """Run ``collector`` when the number of blocks has grown enough from now on."""
        self._collector = self.allocator.collector = collector
        self.allocator.growth = 0

    def forget(self) -> Memory:
        """Free everything; return an empty memory for :meth:`use_memory`."""
        self.workspaces.clear()
        self.workspaces.settings.forget()
        self.allocator.memory.shared = None
        if self.shared is not None:
            self.shared.give_all()
        memory = self.empty_memory(self.index)
        memory.memory.shared = self.shared
        return memory

    def use_memory(self, memory: Memory) -> None:
        """Make ``memory`` this device's own, as if nothing had been allocated before."""
        memory.trace.clear()
        memory.reset_peak_stats()
        memory.collector = self._collector
        memory.observers = self.allocator.observers
        self._own_workspaces.memory = memory
        self.estimates = Estimates(memory)
        self.calls_without_workspace.clear()
        self.dropout_state = 0

    def hold_dropout_state(self) -> None:
        """Allocate the state of recurrent layers' dropout, again if the generator has been seeded.

        Source: get_dropout_state of aten/src/ATen/native/cudnn/RNN.cpp, torch 2.6 to 2.15.
        """
        generator: Any = torch.cuda.default_generators[self.index]
        if self.dropout_state and not generator.was_seeded:
            return
        generator.was_seeded = False
        self.allocator.free(self.allocator.malloc(torch.int64.itemsize, self.stream))  # the seed
        context = provenance()
        context.library = "cuDNN"
        nbytes = dropout_state_bytes(self.model.sm_count)
        before, memory = self.dropout_state, self.allocator
        self.dropout_state = memory.malloc(nbytes, self.stream, context)
        if before:
            memory.free(before)

    def workspaces_in(self, memory: Memory) -> Workspaces:
        """Return the libraries' workspaces, none of them allocated yet, for use with ``memory``."""
        return Workspaces(
            memory,
            self.version,
            self.model.compute_capability,
            self._workspace_config,
            lambda: torch._C._current_graph_task_id() != -1,
        )

    def empty_memory(self, place: int) -> Memory:
        """Return an empty memory of this GPU, whose addresses are those of the device ``place``."""
        return Memory(
            self.model.total_memory,
            settings=self._settings,
            version=self.version,
            device=self.index,
            place_segment=DriverAddresses(FIRST_ADDRESS + (place + 1) * DEVICE_ADDRESSES),
            timeline=self.timeline,
        )

    @property
    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device's memory that are free, and all."""
        return self.allocator.memory.free, self.model.total_memory

    @property
    def estimated(self) -> int:
        """Bytes of the highest peak allocated that are estimated: a closed library decides."""
        return self.estimates.in_peak


def parse_version(text: str | None) -> Version:
    """Return ``(2, 6)`` for ``"2.6"`` or ``"2.6.0+cu124"``; ``None`` is the torch that runs."""
    found = re.match(
        r"([0-9]{1,4})\.([0-9]{1,4})", torch.__version__ if text is None else str(text)
    )
    version = (int(found[1]), int(found[2])) if found else None
    if version is None or version < OLDEST:
        raise ValueError(
            f"torch_version={quoted(text)} is not a release this simulation knows: "
            f'write 2.6 or later, as in torch_version="2.11"'
        )
    return version
