"""Every part of the surface, in the order in which they are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.simulated.surface import (
    autocast,
    backends,
    checkpoints,
    compile,
    cuda,
    devices,
    events,
    factories,
    gradients,
    graphs,
    history,
    kernels,
    legacy,
    optimizers,
    pool_states,
    pools,
    saved,
    script,
    sensors,
    several,
    storages,
    streams,
    tensors,
    unsupported,
    wrappers,
)

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


def plan(simulation: Simulation, patches: Patches) -> None:
    """List every replacement that ``simulation`` needs."""
    for part in (
        tensors,
        gradients,
        factories,
        cuda,
        optimizers,
        several,
        streams,
        events,
        graphs,
        pools,
        pool_states,
        history,
        saved,
        checkpoints,
        autocast,
        compile,
        kernels,
        backends,
        devices,
        legacy,
        script,
        sensors,
        storages,
        unsupported,
        wrappers,
    ):
        part.plan(simulation, patches)
