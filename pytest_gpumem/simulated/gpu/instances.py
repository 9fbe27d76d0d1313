"""Instances of MIG, the parts into which it divides a GPU.

Sources: "NVIDIA Multi-Instance GPU User Guide", "Supported MIG Profiles" (parts of the L2 cache,
which are those of the memory slices, and how many slices there are) and "Getting Started with MIG"
(memory and multiprocessors as ``nvidia-smi`` lists them). CUDA reports the same memory: the manual
page of ``condor_gpu_discovery`` has 20,096 and 4,864 MiB. Profiles whose memory is in neither are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_gpumem.sizes import MIB

COMPUTE_SLICES, MEMORY_SLICES = 7, 8
"""The slices of a GPU that its instances share."""


class Instance(NamedTuple):
    """A profile of MIG."""

    memory: int
    """Bytes."""
    sms: int
    """Streaming multiprocessors."""
    compute_slices: int
    memory_slices: int
    """Eighths of the memory, and of the L2 cache."""


INSTANCES: Mapping[str, Mapping[str, Instance]] = {
    "A100-40GB": {
        "1g.5gb": Instance(4_864 * MIB, 14, 1, 1),
        "2g.10gb": Instance(9_984 * MIB, 28, 2, 2),
        "3g.20gb": Instance(20_096 * MIB, 42, 3, 4),
        "4g.20gb": Instance(20_096 * MIB, 56, 4, 4),
    },
    "H100": {"3g.40gb": Instance(40_448 * MIB, 60, 3, 4)},
}
"""Profiles by the model of the GPU and by name."""


def fit(instances: Sequence[Instance]) -> bool:
    """Return whether one GPU has room for ``instances``."""
    return (
        sum(one.compute_slices for one in instances) <= COMPUTE_SLICES
        and sum(one.memory_slices for one in instances) <= MEMORY_SLICES
    )
