"""Every part of the surface, in the order in which their replacements are added."""

from __future__ import annotations

import torch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.surface import (
    autocast,
    backends,
    checkpoints,
    cuda,
    factories,
    gradients,
    history,
    kernels,
    legacy,
    pool_states,
    pools,
    sensors,
    several,
    storages,
    streams,
    tensors,
    unsupported,
    wrappers,
)


def add_patches(machine: SimulatedMachine, casts: CastCache, patches: Patches) -> None:
    """List every replacement that ``machine`` needs, and autocast's ``casts``."""
    for part in (
        tensors,
        gradients,
        factories,
        cuda,
        several,
        streams,
        pools,
        pool_states,
        history,
        checkpoints,
        backends,
        legacy,
        kernels,
        sensors,
        storages,
        unsupported,
        wrappers,
    ):
        part.add_patches(machine, patches)
    autocast.add_patches(casts, patches)
    patches.join_missing(torch._C)  # of a build without CUDA, which lacks most of them
