"""GPU models of the catalogue as the dry runtime reads them from the environment."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby

from pytest_gpumem.simulated.gpu.catalogue import (
    BUS_WIDTHS,
    COMPUTE_SLICES,
    GPUS,
    INSTANCES,
    LIMITS,
    GpuError,
    GpuModel,
    find_machine,
    fit,
)

DEFAULT = "A100-40GB"


def models_of(names: str) -> list[GpuModel]:
    """Return the GPUs of ``"A100-40GB*2,H100"``, one by one.

    Instances of MIG that follow one another are of one GPU, as in
    ``"A100-40GB/3g.20gb,A100-40GB/2g.10gb"``. Raises ``GpuError`` for a model or a number that does
    not exist, and for instances that do not fit on their GPU.
    """
    machines = [find_machine(name) for name in names.split(",")]
    models = [machine.model for machine in machines for _ in range(machine.count)]
    for parts in _divided(models):
        if parts[0].profile and not fit([INSTANCES[one.parent_name][one.profile] for one in parts]):
            written = ",".join(one.name for one in parts)
            raise GpuError(
                f'"{written}" are more instances of MIG than fit on one {parts[0].parent_name}'
            )
    return models


def _divided(models: Sequence[GpuModel]) -> Iterator[Sequence[GpuModel]]:
    """Yield whole GPUs, each alone, and instances with those of the same GPU."""
    for (_, divided), group in groupby(models, lambda one: (one.parent_name, bool(one.profile))):
        parts = list(group)
        yield from [parts] if divided else [[one] for one in parts]


def description(models: Sequence[GpuModel]) -> str:
    """Return ``models`` as ``source/devices.c`` reads them, in the order of their indices."""
    lines: list[str] = []
    for parts in _divided(models):
        if parts[0].profile:
            lines.append(_one(GPUS[parts[0].parent_name], len(lines)))
        lines += [_one(part, len(lines) + number) for number, part in enumerate(parts)]
    return ";".join(lines)


def _one(model: GpuModel, index: int) -> str:
    limits = LIMITS[model.compute_capability]
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
        "shared": limits.shared_memory,
        "optin": limits.shared_memory_per_block,
        "blocks": limits.blocks,
        "bus": BUS_WIDTHS[model.parent_name],
        "instances": COMPUTE_SLICES if model.name in INSTANCES else 0,
        "instance": int(bool(model.profile)),
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())
