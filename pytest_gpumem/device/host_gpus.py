"""The GPUs that CUDA will show this process, read from the driver before torch is imported."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.option_values import DeviceChoice

DRIVERS: tuple[str, ...] = ("/dev/nvidiactl", "/dev/dxg", "C:\\Windows\\System32\\nvml.dll")
"""Files of which one exists where NVIDIA's driver is installed: under Linux, WSL2, Windows. NVML is
loaded only then, because every run with the plugin installed would pay for it."""


def host_gpus(
    choice: DeviceChoice, environ: Mapping[str, str] | None = None
) -> tuple[NvmlReading, ...]:
    """Return the GPUs and MIG instances that tests may run on; none where they are simulated."""
    if choice.kind not in ("auto", "cuda") or not any(map(os.path.exists, DRIVERS)):
        return ()
    from pytest_gpumem.measurement.nvml import NvmlAbsent, read_visible

    found = read_visible(environ=environ)
    if isinstance(found, NvmlAbsent):
        return ()
    return tuple(found) if choice.index is None else tuple(found[choice.index : choice.index + 1])


def describe(gpus: Sequence[NvmlReading]) -> list[str]:
    """Return the unusual properties of ``gpus``, a clause for each kind."""
    kinds = Counter((_model(gpu), gpu.mode.words) for gpu in gpus)
    clauses = [
        f"{f'{count} x ' if count > 1 else ''}{model} ({', '.join(words)})"
        for (model, words), count in kinds.items()
        if words
    ]
    pids = [process.pid for gpu in gpus for process in gpu.others or ()]
    if pids:
        import psutil

        if not all(map(psutil.pid_exists, pids)):
            clauses.append(
                "NVML numbers processes as the host does: whose memory it is stays unknown"
            )
    return clauses


def refusal(gpus: Sequence[NvmlReading], workers: int, *, placed: bool) -> str | None:
    """Return why ``workers`` processes cannot use ``gpus``, ``None`` where they can.

    Where they are not ``placed``, all of them use the first GPU.
    """
    if not gpus:
        return None
    usable = [gpu for gpu in (gpus if placed else gpus[:1]) if not gpu.mode.prohibited]
    if not usable:
        return (
            f"{_model(gpus[0])} is in compute mode prohibited, in which no process can use it; let "
            "an administrator set the mode (nvidia-smi -c DEFAULT), or run with "
            "--gpumem-device=sim"
        )
    if workers <= len(usable) or not all(gpu.mode.is_exclusive for gpu in usable):
        return None
    one = len(usable) == 1
    return (
        f"-n {workers}: {_model(usable[0]) if one else f'{len(usable)} GPUs'} "
        f"{'is' if one else 'are'} in exclusive-process mode, in which one process at a time can "
        f"use {'it' if one else 'each'}, and MPS does not run; write -n {len(usable)}, start MPS "
        "(nvidia-cuda-mps-control -d), or let an administrator set the mode (nvidia-smi -c "
        "DEFAULT)"
    )


def _model(gpu: NvmlReading) -> str:
    return gpu.name.partition(" MIG")[0]
