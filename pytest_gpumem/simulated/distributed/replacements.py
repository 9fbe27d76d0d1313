"""The replacements in ``torch.distributed``, for one rank of a known or an unknown number.

If the number of ranks is not given, calls that need other ranks are refused. A script for torchrun
runs as the only rank if there is one GPU: when torch makes the default group, it knows the number
of ranks, and that group is a fake one.

Source: torch/distributed/distributed_c10d.py (``init_process_group``,
``_new_process_group_helper``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch.distributed

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.distributed.nccl import Communicator
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnsupportedOperatorError
from pytest_gpumem.values.world import NCCL_TIMEOUT, World

if TYPE_CHECKING:
    from pytest_gpumem.simulated.distributed.process_groups import Groups


_OF_GPUS = ("none", "undefined", "nccl")
"""Names in backends that connect GPUs: without a name, each device has its own backend."""
_FOLLOWED = (*_OF_GPUS, "gloo")
"""Backends whose groups of one rank are replaced by fake ones; the rest are torch's own."""


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
        from pytest_gpumem.simulated.distributed import objects, process_groups, sharded
        from pytest_gpumem.simulated.distributed.collectives import Collectives

        if world is None:
            process_groups.plan_groups(patches)
        else:
            process_groups.add_patches(world, patches)
        objects.add_patches(machine, patches)
        sharded.add_patches(patches)
        sharded.bind(execution)
        collectives = Collectives(machine, execution, communicators)
        collectives.add_patches(patches)
        collectives.bind()

    single_rank = SingleRank(lambda late: add_rank(None, late))
    if world is None or not torch.distributed.is_available():
        _add_refusals(single_rank, patches)
    else:
        add_rank(world, patches)
    return single_rank


def _add_refusals(single_rank: SingleRank, patches: Patches) -> None:
    """Refuse process groups of several GPUs, also those of meshes, unless in ``single_rank``."""
    if not torch.distributed.is_available():
        return
    c10d, name = torch.distributed.distributed_c10d, "_new_process_group_helper"
    init = c10d.init_process_group

    @wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not single_rank.has_begun and _by_nccl(*args, **kwargs):
            raise _for_several()
        init(*args, **kwargs)

    for owner in (torch.distributed, c10d, torch.distributed.device_mesh):
        patches.add(owner, "init_process_group", init_process_group)
    # Builds without NCCL lack it, and warn of that before they make the group.
    patches.add(c10d, "default_pg_nccl_timeout", NCCL_TIMEOUT)
    patches.wrap(c10d, name, partial(_group, single_rank))


def _by_nccl(
    backend: Any = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    *_: Any,
    **__: Any,
) -> bool:
    if world_size <= 0:
        # In the address, or in the environment: torch/distributed/rendezvous.py
        # (``_query_to_dict``, ``_env_rendezvous_handler``).
        query = parse_qs(urlparse(init_method or "env://").query)
        text = query.get("world_size", [os.environ.get("WORLD_SIZE", "")])[0]
        world_size = int(text) if text.isdecimal() else 0
    return _names_any(backend, _OF_GPUS) and world_size != 1


def _names_any(backend: Any, names: tuple[str, ...]) -> bool:
    return any(name in str(backend).lower() for name in names)


def _group(
    single_rank: SingleRank, make: Callable[..., Any], group_size: int, group_rank: Any, ranks: Any,
    backend: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Make a group from final arguments, or refuse it: NCCL would end the process."""
    if not single_rank.has_begun:
        if group_size == 1 and not ranks and _names_any(backend, _FOLLOWED):
            single_rank.begin()
        elif _names_any(backend, _OF_GPUS):
            raise _for_several()
    return make(group_size, group_rank, ranks, backend, *args, **kwargs)


def _for_several() -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f'torch.distributed.init_process_group("nccl") at {user_line()} is for several ranks, and '
        "this is one of an unknown number: mark the test with @pytest.mark.gpumem(ranks=8), or "
        "write simulate(..., world_size=8, rank=0)"
    )


class SingleRank:
    """The only rank of a machine's world; ``add_patches`` adds its replacements."""

    def __init__(self, add_patches: Callable[[Patches], None]) -> None:
        self._add_patches = add_patches
        self.patches = Patches()
        """Replacements in ``torch.distributed``, which few tests need."""
        self._groups: Groups | None = None
        self._inside = ExitStack()
        self.has_begun = False
        """Whether the process is in this world now."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter this world inside if it had begun before, and leave it afterwards."""
        with ExitStack() as self._inside:
            if self._groups is not None and self._groups.tables["_pg_names"]:
                self.begin()
            yield

    def begin(self) -> None:
        """Enter this world, until :meth:`restored` ends."""
        if self.has_begun:
            return
        # Imported late: not needed without process groups.
        from pytest_gpumem.simulated.distributed.process_groups import Groups

        if not self.patches.added:
            self._add_patches(self.patches)
        self._inside.enter_context(self.patches.applied())
        self._groups = self._groups or Groups()
        self._inside.enter_context(self._groups.entered())
        self.has_begun = True
        self._inside.callback(setattr, self, "has_begun", False)
