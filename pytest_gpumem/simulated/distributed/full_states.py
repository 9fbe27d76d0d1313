"""Whole state dictionaries: other ranks' answers are derived from this rank's state.

Under FSDP a rank keeps the optimizer's state of those parameters of which it has a part, and
receives descriptions of the others' states. Rank 0 announces the tensors of a state before it sends
it.

Source: torch/distributed/fsdp/_optim_utils.py (``_map_param_key_to_optim_keys``,
``_allgather_state_info``), torch/distributed/_state_dict_utils.py (``_broadcast_state_dict``),
torch 2.6 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import _optim_utils

from pytest_gpumem.simulated.common.patching import Patches

if TYPE_CHECKING:
    from pytest_gpumem.simulated.distributed.objects import Told


def add_patches(told_by_root: Told, patches: Patches) -> None:
    """Derive the states of other ranks from this rank's own."""
    states = _OptimizerStates()
    patches.add(_optim_utils, "_map_param_key_to_optim_keys", states.keys)
    patches.add(_optim_utils, "_allgather_state_info", states.gathered)
    broadcast = _state_dict_utils._broadcast_state_dict

    @functools.wraps(broadcast)
    def _broadcast_state_dict(
        full_state_dict: Mapping[str, Any],
        local_state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        sent = full_state_dict or local_state_dict
        told = {name: _told(value) for name, value in sent.items()} if dist.get_rank() else None
        with told_by_root(told):
            broadcast(dict(full_state_dict), local_state_dict, *args, **kwargs)

    for owner in (_state_dict_utils, state_dict):
        patches.add(owner, "_broadcast_state_dict", _broadcast_state_dict)


def _told(value: Any) -> Any:
    """Return rank 0's announcement of a value."""
    if not isinstance(value, torch.Tensor):
        return value
    return _state_dict_utils._TensorInfo(value.size(), value.dtype) if value.dim() else value.cpu()


class _OptimizerStates:
    """The optimizer states: a parameter with a part on other ranks has a state like one here."""

    def __init__(self) -> None:
        self._map = _optim_utils._map_param_key_to_optim_keys
        self._gather = _optim_utils._allgather_state_info
        self._like: Mapping[str, Any] = {}
        """The state of some parameter."""

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
