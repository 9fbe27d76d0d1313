"""Memory snapshots whose stacks are those of the program, without the code that follows values.

Operators pass through Python on their way to the device (``dispatch.py``), and the allocator keeps
the stack of each allocation. The program's own line stands first again, as on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.dry import values
from pytest_gpumem.simulated.common.patching import Patches

_OWN = os.path.join(os.path.dirname(values.__file__), "")  # noqa: PTH118, PTH120 - as frames write it
_CALLED_BY_OWN = os.path.join("torch", "_ops.py")  # noqa: PTH118

Frame = dict[str, Any]


@contextmanager
def snapshots_without_own() -> Iterator[None]:
    """Shorten the stacks of the snapshots that torch makes inside."""
    taken = torch._C._cuda_memorySnapshot

    def shortened(*args: Any) -> dict[str, Any]:
        snapshot = taken(*args)
        segments = snapshot.get("segments", [])
        blocks = [block for segment in segments for block in segment["blocks"]]
        traces = [entry for trace in snapshot.get("device_traces", []) for entry in trace]
        holders = (*segments, *blocks, *traces)
        # Entries of the same stack have one list between them.
        stacks = {id(each["frames"]): each["frames"] for each in holders if each.get("frames")}
        for frames in stacks.values():
            frames[:] = _programs(frames)
        return snapshot

    patches = Patches()
    patches.add(torch._C, "_cuda_memorySnapshot", shortened)
    patches.apply()
    try:
        yield
    finally:
        patches.undo()


def _programs(frames: list[Frame]) -> list[Frame]:
    """Return the frames, innermost first, that are neither of this folder nor called by it."""
    kept: list[Frame] = []
    is_own = False
    for frame in reversed(frames):
        name = frame["filename"]
        if name.endswith(".py"):
            is_own = name.startswith(_OWN) or (is_own and name.endswith(_CALLED_BY_OWN))
            if is_own:
                continue
        kept.append(frame)
    kept.reverse()
    return kept
