"""The GPUs that CUDA will show this process, read from the driver before torch is imported.

Without a GPU, ``--gpumem-device=auto`` is the dry device where it is available, else sim.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.option_values import DeviceChoice

DRIVERS: tuple[str, ...] = ("/dev/nvidiactl", "/dev/dxg", "C:\\Windows\\System32\\nvml.dll")
"""Files of NVIDIA's driver under Linux, WSL2 and Windows. NVML is loaded only if one exists,
because that takes time in every run with the plugin installed."""

REFUSED = "PYTEST_GPUMEM_AUTO_SIMULATED"
"""The variable with the reason why ``auto`` is a simulated device here and in child processes."""


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed, without which there is no GPU."""
    return any(map(os.path.exists, DRIVERS))


def host_gpus(choice: DeviceChoice) -> tuple[NvmlReading, ...]:
    """Return the GPUs and MIG instances that tests may run on; none where they are simulated."""
    if choice.kind not in ("auto", "cuda") or not has_driver():
        return ()
    from pytest_gpumem.measurement.nvml import NvmlAbsent, read_visible

    found = read_visible()
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
                "NVML reports PIDs of the host, so memory cannot be assigned to processes in this "
                "container"
            )
    return clauses


def why_not_usable(gpus: Sequence[NvmlReading], workers: int, *, placed: bool) -> str | None:
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


def resolved(choice: DeviceChoice, baselines: Path) -> DeviceChoice:
    """Return ``choice``, or the dry device in place of ``auto`` if available; only reads files."""
    if choice.kind != "auto":
        return choice
    reason = why_not(baselines)
    if reason is None:
        return choice._replace(kind="dry", of_auto=True)
    is_known = reason in _EXPECTED or reason == os.environ.get(REFUSED)
    tried = reason.startswith(TRIED)
    return choice._replace(not_dry="" if is_known and not tried else reason.removeprefix(TRIED))


TRIED = "it was tried: "
"""Prefix of a reason that this plugin has set; a value set by the user is shown as it is."""


_DRIVER = "NVIDIA's driver is installed"
_SYSTEM = "the dry device runs on Linux only"
_BUILD = "there is no CUDA build of torch"
_LAUNCHED = "the program has the dry device as its GPU"
_EXPECTED = frozenset({_DRIVER, _SYSTEM, _BUILD, _LAUNCHED})
"""Reasons that users know, and that are not shown."""


def why_not(baselines: Path) -> str | None:
    """Return why ``auto`` does not select the dry device, ``None`` if it does."""
    if reason := os.environ.get(REFUSED):
        return reason
    if has_driver():
        return _DRIVER
    if sys.platform != "linux":
        return _SYSTEM
    from pytest_gpumem.dry.build import cuda_of, missing_tool, release_of

    spec = find_spec("torch")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or cuda_of(folder) is None:
        return _BUILD
    if _are_simulated(baselines, release_of(folder)):
        return "the project's baselines are those of simulated devices"
    from pytest_gpumem.dry.load import is_launched, is_loaded

    if is_launched():
        return _LAUNCHED
    if "torch" in sys.modules and not is_loaded():
        return "torch has been imported already"
    tool = missing_tool()
    return None if tool is None else f"there is no {tool}"


def _are_simulated(baselines: Path, release: str) -> bool:
    """Return whether ``baselines`` has some of simulated devices and none of dry ones.

    Only those of the torch ``release`` count, if there are any.
    """
    names: list[str] = []
    with suppress(OSError):
        names += [each.name for each in baselines.iterdir()]
    of_release = re.compile(rf"-torch{'.'.join(release.split('.')[:2])}(-|$)")
    names = list(filter(of_release.search, names)) or names
    kinds = {name.partition("-")[0] for name in names}
    return "sim" in kinds and "dry" not in kinds
