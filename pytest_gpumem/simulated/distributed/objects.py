"""Python objects that ranks send each other: other ranks' objects are taken to equal this one's.

On a GPU they travel as bytes in small tensors, which are left out. Whole state dictionaries are
derived from this rank's state: under FSDP a rank keeps the optimizer's state of those parameters of
which it has a part, and receives descriptions of the others' states. Rank 0 announces the tensors
of a state before it sends it.

Source: torch/distributed/distributed_c10d.py (``all_gather_object`` and those that follow it),
torch/distributed/fsdp/_optim_utils.py (``_map_param_key_to_optim_keys``,
``_allgather_state_info``), torch/distributed/_state_dict_utils.py (``_broadcast_state_dict``),
torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import _optim_utils

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnknownValueError

_FUNCTIONS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions, wherever torch names them, and derive other ranks' states."""
    objects = _Objects(machine)
    for name in _FUNCTIONS:
        for owner in (dist, c10d):
            patches.add(owner, name, getattr(objects, name))
    patches.add(_optim_utils, "_map_param_key_to_optim_keys", objects.keys)
    patches.add(_optim_utils, "_allgather_state_info", objects.gathered)
    for owner in (_state_dict_utils, state_dict):
        patches.add(owner, "_broadcast_state_dict", objects.broadcast_state_dict)


class _Objects:
    """The functions of torch, with their own arguments, for ranks that are alike."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._announced: Any = None
        """The object that the root broadcasts now, if it is known."""
        self._map = _optim_utils._map_param_key_to_optim_keys
        self._gather = _optim_utils._allgather_state_info
        self._broadcast = _state_dict_utils._broadcast_state_dict
        self._like: Mapping[str, Any] = {}
        """The state of some parameter."""

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._gather_object("all_gather_object", obj, object_list, group)

    def _gather_object(self, name: str, obj: Any, object_list: list[Any], group: Any) -> None:
        self._note(name)
        size = dist.get_world_size(group)
        object_list[:size] = [deepcopy(obj) for _ in range(size)]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        if object_gather_list is not None:
            self._gather_object("gather_object", obj, object_gather_list, group)

    def broadcast_object_list(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        """Return what this rank would send, unless the root's object is set."""
        if self._announced is not None:
            object_list[0] = self._announced
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
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]

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

    def broadcast_state_dict(
        self,
        full_state_dict: Mapping[str, Any],
        local_state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if dist.get_rank():
            sent = full_state_dict or local_state_dict
            self._announced = {name: _announcement(value) for name, value in sent.items()}
        try:
            self._broadcast(dict(full_state_dict), local_state_dict, *args, **kwargs)
        finally:
            self._announced = None

    def keys(
        self,
        optim_state_dict: dict[str, Any],
        group: Any,
        param_key_to_param: dict[Any, Any],
        param_to_fqns: dict[Any, list[str]],
        fqn_to_fsdp_param_info: dict[str, Any],
        merge_keys: bool = False,
    ) -> tuple[list[Any], dict[Any, Any]]:
        """``_map_param_key_to_optim_keys``."""
        given = param_key_to_param, param_to_fqns, fqn_to_fsdp_param_info
        every, own = self._map(optim_state_dict, group, *given, merge_keys=True)
        states = optim_state_dict["state"]
        self._like = next(iter(states.values()), {})
        if not merge_keys:
            return list(own), own
        elsewhere = {
            _optim_utils._OptimStateKey(tuple(param_to_fqns[param]), is_fsdp_managed=True)
            for key, param in param_key_to_param.items()
            if states and key not in states and not param.numel()
            if param_to_fqns[param][0] in fqn_to_fsdp_param_info
        }
        return sorted({*every, *elsewhere}), own

    def gathered(self, fsdp_state: Any, input_states: dict[str, Any]) -> Any:
        """``_allgather_state_info``."""
        states = {name: state or self._like for name, state in input_states.items()}
        return self._gather(fsdp_state, states)


def _announcement(value: Any) -> Any:
    """Return rank 0's announcement of a value."""
    if not isinstance(value, torch.Tensor):
        return value
    return _state_dict_utils._TensorInfo(value.size(), value.dtype) if value.dim() else value.cpu()


def _refuse(name: str) -> NoReturn:
    raise UnknownValueError(
        f"{name} at {user_line()} receives what only another rank knows: a pipeline's stage needs "
        "its input_args and output_args"
    )
