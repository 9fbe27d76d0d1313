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


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions below ``torch.cuda.memory``, torch/csrc/cuda/memory_snapshot.cpp.

    Both that record take more arguments in later releases: 2.6 ends before ``clear_history``,
    ``skip_actions`` is the last one since 2.10, and the last two are of 2.15. Without
    ``record_cuda`` the recording of the device allocator is off (seen with torch 2.15.0+cu132);
    the history of pinned memory of the host, ``record_pinned_host_memory``, is not recorded.
    """

    def record(recording: Recording, clear: bool) -> None:
        for gpu in machine.gpus:
            gpu.allocator.record_history(recording, clear=clear)

    def record_history(
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
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in _CONTEXTS:
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        if stacks not in ("python", "all"):
            raise RuntimeError("expected stacks to be 'python', or 'all'")
        recording = Recording(
            on=enabled is not None and record_cuda,
            contexts=_CONTEXTS[context],
            with_cpp=stacks == "all",
            max_entries=max_entries if enabled == "all" else _KEPT_WITHOUT_TRACE,
            skipped=frozenset(skip_actions),
        )
        record(recording, clear_history)

    def record_history_legacy(
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
        record(recording, clear_history)

    def is_enabled() -> bool:
        recording = machine.current.allocator.trace.recording
        return recording is None or recording.on

    def allocation_traceback(data_ptr: int) -> list[dict[str, Any]] | None:
        for gpu in machine.gpus:
            context = gpu.allocator.live_contexts().get(data_ptr)
            if context is not None:
                return frames_of(context, gpu.allocator.trace) or None
        return None

    functions = {
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history_legacy,
        "_cuda_isHistoryEnabled": is_enabled,
        "_cuda_allocationTraceback": allocation_traceback,
    }
    add_functions(functions, patches)
