"""``replay()``: recorded allocations, run through the allocator of a GPU of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpumem.allocator import ReplayResult
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.replay import replay as replayed
from pytest_gpumem.simulated.gpu.catalogue import find_gpu


def replay(
    snapshot: Mapping[str, Any] | str | Path,
    alloc_conf: str | None = None,
    gpu: str | None = None,
    *,
    version: Version | None = None,
    used_elsewhere: int = 0,
    courses: bool = False,
) -> ReplayResult:
    """Run the recorded allocations and frees through a simulated allocator.

    The counts and ``first_mismatch`` compare the recording with its replay under the recorded
    settings. ``alloc_conf`` and ``gpu`` replay under other settings instead: there, memory that
    was live when recording began is allocated anew.

    Args:
        snapshot: a dict of ``torch.cuda.memory._snapshot()``, or the path of a pickled one.
        alloc_conf: allocator settings to try, as in PYTORCH_CUDA_ALLOC_CONF.
        gpu: a model of the catalogue, ``"A100-40GB"``, whose memory must suffice.
        version: the torch release whose rules hold, ``(2, 6)``; a snapshot does not contain its
            release, so by default one that writes such snapshots.
        used_elsewhere: bytes of ``gpu`` outside the allocator: the CUDA context, other processes.
        courses: whether the result holds each run, event by event.

    Raises:
        SnapshotError: ``snapshot`` is not a memory snapshot, or its history has gaps.
        AllocatorError: the settings ask for something that is not simulated.
        GpuError: ``gpu`` is not in the catalogue.
    """
    model = None if gpu is None else find_gpu(gpu)
    return replayed(
        snapshot,
        alloc_conf,
        None if model is None else (model.name, model.total_memory),
        version=version,
        used_elsewhere=used_elsewhere,
        courses=courses,
    )
