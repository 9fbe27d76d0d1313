"""What is replaced of ``torch.distributed``: another set where a process is a rank of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed

from pytest_gpumem.simulated.distributed import refusals

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.distributed.nccl import Communicator
    from pytest_gpumem.simulated.distributed.world import World
    from pytest_gpumem.simulated.execution.mode import ShapeExecution
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def plan(
    machine: SimulatedMachine, execution: ShapeExecution, world: World | None, patches: Patches
) -> Mapping[str, Communicator]:
    """Let ``machine`` be that of one rank of ``world``, or refuse what needs one.

    Returns what will hold the communicators that NCCL would have made, by name of their group.
    """
    if world is None or not torch.distributed.is_available():
        refusals.plan(patches)
        return {}
    # What a simulation of one process need not import.
    from pytest_gpumem.simulated.distributed import (
        checkpoints,
        full_states,
        objects,
        pipelines,
        process_groups,
        propagation,
        purposes,
        sharded,
        spawned,
    )
    from pytest_gpumem.simulated.distributed.collectives import Collectives

    process_groups.plan(world, patches)
    propagation.plan(patches)
    purposes.plan(patches)
    full_states.plan(objects.plan(machine, patches), patches)
    pipelines.plan(machine, patches)
    checkpoints.plan(machine, patches)
    sharded.plan(patches)
    spawned.plan(world, patches)
    sharded.bind(execution)
    collectives = Collectives(machine, execution)
    collectives.plan(patches)
    collectives.bind()
    return collectives.communicators
