"""``--gpumem-device=auto``: a GPU, else the dry device where there can be one, else sim."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.device.host_gpus import DRIVERS

if TYPE_CHECKING:
    from pytest_gpumem.option_values import DeviceChoice

REFUSED = "PYTEST_GPUMEM_AUTO_SIMULATED"
"""The variable with the reason why ``auto`` is a simulated device here and in child processes."""


def settled(choice: DeviceChoice, baselines: Path) -> DeviceChoice:
    """Return ``choice``, or the dry device in place of ``auto`` if available; only reads files."""
    if choice.kind != "auto" or why_not(baselines) is not None:
        return choice
    return choice._replace(kind="dry", of_auto=True)


def why_not(baselines: Path) -> str | None:
    """Return why ``auto`` does not select the dry device, ``None`` if it does."""
    if reason := os.environ.get(REFUSED):
        return reason
    if has_driver():
        return "NVIDIA's driver is installed"
    if sys.platform != "linux":
        return "the dry device runs on Linux only"
    from pytest_gpumem.dry.version import cuda_of, release_of

    spec = find_spec("torch")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or cuda_of(folder) is None:
        return "there is no CUDA build of torch"
    if _are_simulated(baselines, release_of(folder)):
        return "the project's baselines are those of simulated devices"
    from pytest_gpumem.dry.build import has_compiler
    from pytest_gpumem.dry.load import is_launched, is_loaded

    if is_launched():
        return "the program has the dry device as its GPU"
    if "torch" in sys.modules and not is_loaded():
        return "torch has been imported already"
    return None if has_compiler() else "there is no C compiler"


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed, without which there is no GPU."""
    return any(map(os.path.exists, DRIVERS))


def _are_simulated(baselines: Path, release: str) -> bool:
    """Return whether ``baselines`` are those of simulated devices, and none are of dry ones.

    Those of the torch ``release`` decide, where it has any.
    """
    names: list[str] = []
    with suppress(OSError):
        names += [each.name for each in baselines.iterdir()]
    of_release = re.compile(rf"-torch{'.'.join(release.split('.')[:2])}(-|$)")
    names = list(filter(of_release.search, names)) or names
    kinds = {name.partition("-")[0] for name in names}
    return "sim" in kinds and "dry" not in kinds
