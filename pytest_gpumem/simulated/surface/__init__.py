"""What user code sees of CUDA, replaced while a simulation is active."""

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
    pools,
    saved,
    script,
    sensors,
    several,
    storages,
    streams,
    tensors,
    unsupported,
)

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
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
    ):
        part.plan(simulation, patches)
