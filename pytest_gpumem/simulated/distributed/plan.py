"""The replacements in ``torch.distributed``: another set where a process is a rank of several."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch.distributed

from pytest_gpumem.simulated.distributed import refusals
from pytest_gpumem.simulated.distributed.alone import Alone

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.distributed.nccl import Communicator
    from pytest_gpumem.simulated.execution.mode import ShapeExecution
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine
    from pytest_gpumem.values.world import World

Communicators = MutableMapping[str, "Communicator"]
"""The communicators that NCCL would have created, by group name."""


def plan(
    machine: SimulatedMachine,
    execution: ShapeExecution,
    world: World | None,
    patches: Patches,
    communicators: Communicators,
) -> Alone:
    """Plan ``machine`` as one rank of ``world``, or refuse calls that need several.

    Returns the world of one rank that code without a ``world`` may begin. ``communicators``
    receives those that NCCL would have created.
    """
    alone = Alone(lambda late: _plan_rank(machine, execution, None, late, communicators))
    if world is None or not torch.distributed.is_available():
        refusals.plan(alone, patches)
    else:
        _plan_rank(machine, execution, world, patches, communicators)
    return alone


def _plan_rank(
    machine: SimulatedMachine,
    execution: ShapeExecution,
    world: World | None,
    patches: Patches,
    communicators: Communicators,
) -> None:
    # Imported late: not needed to simulate one process.
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

    if world is None:
        process_groups.plan_groups(patches)
    else:
        process_groups.plan(world, patches)
        spawned.plan(world, patches)
    propagation.plan(patches)
    purposes.plan(patches)
    full_states.plan(objects.plan(machine, patches), patches)
    pipelines.plan(machine, patches)
    checkpoints.plan(machine, patches)
    sharded.plan(patches)
    sharded.bind(execution)
    collectives = Collectives(machine, execution, communicators)
    collectives.plan(patches)
    collectives.bind()
