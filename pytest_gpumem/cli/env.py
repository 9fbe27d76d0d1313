"""``gpumem env``: the facts of this machine on which a number depends, for bug reports."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pytest_gpumem.cli.command import Answer, Command, table
from pytest_gpumem.report.header import installed_release

PACKAGES = ("pytest-gpumem", "pytest", "torch", "nvidia-ml-py", "triton", "transformers")
"""Packages whose release may change a number or its reading."""
VARIABLES = (
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLAS_WORKSPACE_CACHE"),
    *("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING"),
)
"""Variables that torch and NVIDIA's libraries read, and that change allocations."""
NOT_INSTALLED = "not installed"


def run(arguments: argparse.Namespace) -> Answer:
    """Collect the facts."""
    known = found()
    return Answer(table(list(_rows(known)), left=(0, 1)), lambda: known)


def found() -> dict[str, Any]:
    """Return the facts as builtin types; initialises CUDA where there is a GPU."""
    devices, trouble, libraries = _devices()
    return {
        "system": " ".join((platform.system(), platform.release(), platform.machine())),
        "python": platform.python_version(),
        "packages": {name: installed_release(name) for name in PACKAGES},
        **libraries,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": devices,
        "no_device": trouble,
    }


def _devices() -> tuple[list[dict[str, Any]], str | None, dict[str, Any]]:
    """Return torch's devices, the reason if there are none, and the releases of its libraries."""
    libraries: dict[str, Any] = {"cuda": None, "cudnn": None}
    try:
        import torch
    except ImportError as error:
        if error.name == "_C":
            return [], f"torch cannot be imported: {error}", libraries
        if error.name != "torch":
            raise
        return [], f"torch is {NOT_INSTALLED}", libraries
    from pytest_gpumem.device.cuda import CudaDevice
    from pytest_gpumem.measurement.nvml import NvmlAbsent, read_all

    libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [], "this torch is built without CUDA", libraries
        readings = read_all()
        if isinstance(readings, NvmlAbsent):
            return [], f"torch sees no CUDA device: {readings.reason}", libraries
        names = ", ".join(reading.name for reading in readings) or "none"
        return [], f"torch sees no CUDA device, though the driver shows {names}", libraries
    devices = []
    for device in map(CudaDevice, range(torch.cuda.device_count())):
        environment = {**device.environment.to_dict(), "key": device.environment.key}
        devices.append({**asdict(device.machine.model), "environment": environment})
    return devices, None, libraries


def _rows(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "system", known["system"]
    yield "Python", known["python"]
    for name, release in known["packages"].items():
        yield name, release or NOT_INSTALLED
    yield "CUDA of torch", known["cuda"] or "none"
    yield "cuDNN of torch", str(known["cudnn"] or "none")
    yield from known["variables"].items()
    if known["no_device"]:
        yield "GPU", f"none: {known['no_device']}"
    for index, device in enumerate(known["devices"]):
        environment = device["environment"]
        major, minor = device["compute_capability"]
        yield f"cuda:{index}", device["full_name"]
        yield "  compute capability", f"{major}.{minor}"
        yield "  memory", f"{device['total_memory']:,} B"
        threads = device["max_threads_per_sm"]
        yield "  multiprocessors", f"{device['sm_count']}, of {threads:,} threads"
        yield "  L2 cache", f"{device['l2_cache_bytes']:,} B"
        yield "  driver", environment["driver"] or "unknown"
        yield "  divided", environment["partition"] or "no"
        yield "  baselines", environment["key"]


COMMAND = Command(
    description="Show the releases, the settings and the GPUs that a measured or simulated "
    "number depends on. No names of hosts, users or folders are in it.",
    run=run,
    json="as JSON, sizes in bytes",
    examples=("gpumem env --json",),
    shows_state=True,
)
