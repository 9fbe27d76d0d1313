"""``--gpumem-device=auto``: a GPU, else the dry device where there can be one, else sim."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.device.host_gpus import DRIVERS

if TYPE_CHECKING:
    from pytest_gpumem.option_values import DeviceChoice

TAKES_DRY = False
"""Whether ``auto`` takes the dry device."""


def settled(choice: DeviceChoice) -> DeviceChoice:
    """Return ``choice``, or the dry device in place of ``auto`` if available; only reads files."""
    if choice.kind != "auto" or not TAKES_DRY or why_not() is not None:
        return choice
    return choice._replace(kind="dry")


def why_not() -> str | None:
    """Return why ``auto`` does not select the dry device, ``None`` if it does."""
    from pytest_gpumem.dry.build import has_compiler
    from pytest_gpumem.dry.torch_build import cuda_of

    if any(map(os.path.exists, DRIVERS)):
        return "NVIDIA's driver is installed"
    if sys.platform != "linux":
        return "the dry device runs on Linux only"
    spec = find_spec("torch")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or cuda_of(folder) is None:
        return "there is no CUDA build of torch"
    if not has_compiler():
        return "there is no C compiler"
    return None
