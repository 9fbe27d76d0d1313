"""``torch.cuda.memory._record_memory_history``: the past events in snapshots."""

from __future__ import annotations

import sys
from typing import Any

from pytest_gpumem.allocator.snapshot import frames_of
from pytest_gpumem.allocator.trace import Contexts, Recording
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_CONTEXTS = {
    None: Contexts.NEVER,
    "state": Contexts.STATE,
    "alloc": Contexts.ALLOC,
    "all": Contexts.ALL,
}
_KEPT_WITHOUT_TRACE = 1
"""Events kept with ``enabled="state"``."""


class _Api:
    """The functions of ``torch._C``, as torch/csrc/cuda/memory_snapshot.cpp has them.

    Both take more arguments in later releases: 2.6 ends before ``clear_history``,
    ``skip_actions`` is the last one since 2.10, and the last two are of 2.15. Without
    ``record_cuda`` the recording of the device allocator is off (seen with torch 2.15.0+cu132);
    the history of pinned memory of the host, ``record_pinned_host_memory``, is not recorded.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def _cuda_record_memory_history(
        self,
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Any = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        _check(enabled, ("state", "all"), "expected state to be 'state', 'all', or None")
        _check(
            context,
            ("state", "alloc", "all"),
            "expected context to be 'state', 'alloc', 'all', or None",
        )
        _check(stacks, ("python", "all"), "expected stacks to be 'python', or 'all'")
        recording = Recording(
            on=enabled is not None and record_cuda,
            contexts=_CONTEXTS[context],
            with_cpp=stacks == "all",
            max_entries=max_entries if enabled == "all" else _KEPT_WITHOUT_TRACE,
            skipped=frozenset(skip_actions),
        )
        self._record(recording, clear_history)

    def _cuda_record_memory_history_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Any = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        contexts = Contexts.STATE if record_context else Contexts.NEVER
        recording = Recording(
            on=enabled and record_cuda,
            contexts=Contexts.ALLOC if trace_alloc_record_context else contexts,
            with_cpp=record_context_cpp,
            max_entries=trace_alloc_max_entries,
            skipped=frozenset(skip_actions),
        )
        self._record(recording, clear_history)

    def _cuda_isHistoryEnabled(self) -> bool:
        recording = self._machine.current.allocator.trace.recording
        return recording is None or recording.on

    def _cuda_allocationTraceback(self, data_ptr: int) -> list[dict[str, Any]] | None:
        for gpu in self._machine.gpus:
            context = gpu.allocator.live_contexts().get(data_ptr)
            if context is not None:
                return frames_of(context, gpu.allocator.trace) or None
        return None

    def _record(self, recording: Recording, clear: bool) -> None:
        for gpu in self._machine.gpus:
            gpu.allocator.record_history(recording, clear=clear)


def _check(given: str | None, accepted: tuple[str, ...], complaint: str) -> None:
    if given is not None and given not in accepted:
        raise RuntimeError(complaint)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions below ``torch.cuda.memory``."""
    add_functions(_Api(machine), patches)
