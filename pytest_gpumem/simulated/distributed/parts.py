"""The replacements in ``torch.distributed``: another set where a process is a rank of several."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch.distributed

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.distributed import refusals
from pytest_gpumem.simulated.distributed.nccl import Communicator
from pytest_gpumem.simulated.distributed.refusals import SingleRank
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.world import World


def add_patches(
    machine: SimulatedMachine,
    execution: ShapeExecution,
    world: World | None,
    patches: Patches,
    communicators: MutableMapping[str, Communicator],
) -> SingleRank:
    """Plan ``machine`` as one rank of ``world``, or refuse calls that need several.

    Returns the world of one rank that code without a ``world`` may begin. ``communicators``
    receives those that NCCL would have created, by group name.
    """

    def add_rank(world: World | None, patches: Patches) -> None:
        # Imported late: not needed to simulate one process.
        from pytest_gpumem.simulated.distributed import (
            checkpoints,
            objects,
            pipelines,
            process_groups,
            propagation,
            purposes,
            sharded,
        )
        from pytest_gpumem.simulated.distributed.collectives import Collectives

        if world is None:
            process_groups.plan_groups(patches)
        else:
            process_groups.add_patches(world, patches)
        propagation.add_patches(patches)
        purposes.add_patches(patches)
        objects.add_patches(machine, patches)
        pipelines.add_patches(machine, patches)
        checkpoints.add_patches(machine, patches)
        sharded.add_patches(patches)
        sharded.bind(execution)
        collectives = Collectives(machine, execution, communicators)
        collectives.add_patches(patches)
        collectives.bind()

    single_rank = SingleRank(lambda late: add_rank(None, late))
    if world is None or not torch.distributed.is_available():
        refusals.add_patches(single_rank, patches)
    else:
        add_rank(world, patches)
    return single_rank
