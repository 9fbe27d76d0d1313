"""Python objects that ranks send each other: other ranks' objects are taken to equal this one's.

On a GPU they travel as bytes in small tensors, which are left out.

Source: torch/distributed/distributed_c10d.py (``all_gather_object`` and those that follow it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnknownValueError

Told = Callable[[Any], AbstractContextManager[None]]
"""The object that the root broadcasts inside, unless it is ``None``."""
_FUNCTIONS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def add_patches(machine: SimulatedMachine, patches: Patches) -> Told:
    """Replace the functions, wherever torch names them."""
    objects = _Objects(machine)
    for name in _FUNCTIONS:
        for owner in (dist, c10d):
            patches.add(owner, name, getattr(objects, name))
    return objects.told_by_root


class _Objects:
    """The functions of ``torch.distributed``, with their own arguments."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._told: Any = None

    @contextmanager
    def told_by_root(self, value: Any) -> Iterator[None]:
        self._told = value
        try:
            yield
        finally:
            self._told = None

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._note("all_gather_object")
        object_list[: dist.get_world_size(group)] = _each(obj, dist.get_world_size(group))

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        if object_gather_list is not None:
            self._note("gather_object")
            size = dist.get_world_size(group)
            object_gather_list[:size] = _each(obj, size)

    def broadcast_object_list(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        """Return what this rank would send, unless the root's object is set."""
        if self._told is not None:
            object_list[0] = self._told
            return
        self._note("broadcast_object_list")

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        if scatter_object_input_list is None:
            _refuse("scatter_object_list")
        rank = dist.get_rank(group)
        scatter_object_output_list[0] = scatter_object_input_list[rank]

    def send_object_list(self, *_: Any, **__: Any) -> None:
        """Send nothing."""

    def recv_object_list(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("recv_object_list")

    def _note(self, name: str) -> None:
        if dist.get_world_size() == 1:
            return  # there are no others
        self._machine.note(
            f"{name} at {user_line()} takes what other ranks send for what this one does"
        )


def _each(value: Any, count: int) -> list[Any]:
    return [deepcopy(value) for _ in range(count)]


def _refuse(name: str) -> NoReturn:
    raise UnknownValueError(
        f"{name} at {user_line()} receives what only another rank knows: a pipeline's stage needs "
        "its input_args and output_args"
    )
