"""GPU models of the catalogue as the dry runtime reads them from the environment."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_machine
from pytest_gpumem.sizes import KIB

DEFAULT = "A100-40GB"

# Per multiprocessor and, opted in, per block in KiB, and blocks that a multiprocessor holds: "CUDA
# C++ Programming Guide", "Technical Specifications per Compute Capability".
_LIMITS = {
    (7, 0): (96, 96, 32),
    (7, 5): (64, 64, 16),
    (8, 0): (164, 163, 32),
    (8, 6): (100, 99, 16),
    (8, 9): (100, 99, 24),
    (9, 0): (228, 227, 32),
    (10, 0): (228, 227, 32),
    (12, 0): (100, 99, 24),
}

_BUS_WIDTHS = {
    "T4": 256,
    "V100": 4096,
    "V100-32GB": 4096,
    "A10": 384,
    "A10G": 384,
    "A100-40GB": 5120,
    "A100-80GB": 5120,
    "L4": 192,
    "L40S": 384,
    "RTX-3060": 192,
    "RTX-3090": 384,
    "RTX-4060": 128,
    "RTX-4090": 384,
    "H100": 5120,
    "H200": 6144,
    "B200": 8192,
}
"""Bits of the memory bus, from NVIDIA's data sheets."""


def models_of(names: str) -> list[GpuModel]:
    """Return the GPUs of ``"A100-40GB*2,H100"``, one by one.

    Raises ``GpuError`` for a model or a number that does not exist.
    """
    machines = [find_machine(name) for name in names.split(",")]
    return [machine.model for machine in machines for _ in range(machine.count)]


def description(models: Sequence[GpuModel]) -> str:
    """Return ``models`` as ``source/devices.c`` reads them, in the order of their indices."""
    return ";".join(_one(model, index) for index, model in enumerate(models))


def _one(model: GpuModel, index: int) -> str:
    shared, optin, blocks = _LIMITS[model.compute_capability]
    major, minor = model.compute_capability
    fields = {
        "name": model.full_name,
        "uuid": uuid.uuid5(uuid.NAMESPACE_OID, f"{model.name}/{index}").hex,
        "memory": model.total_memory,
        "major": major,
        "minor": minor,
        "sms": model.sm_count,
        "threads": model.max_threads_per_sm,
        "l2": model.l2_cache_bytes,
        "shared": shared * KIB,
        "optin": optin * KIB,
        "blocks": blocks,
        "bus": _BUS_WIDTHS[model.name],
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())
