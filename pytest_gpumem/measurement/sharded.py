"""Sharded parameters: the memory of tensors that are made of others, and tensors kept by FSDP.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (``FSDPParam``), _fsdp_state.py,
torch/distributed/_composable_state.py and torch/utils/_python_dispatch.py, torch 2.6 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of ``tensor``: a DTensor's is its local one's."""
    whole: Any = tensor
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(whole):
        yield tensor
        return
    names, _ = whole.__tensor_flatten__()
    for name in names:
        part = getattr(whole, name)
        if isinstance(part, torch.Tensor):
            yield from parts_of(part)


def parameters_aside(part: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield owner, name and parameter of those that ``fully_shard`` keeps for ``part`` elsewhere.

    While a module is whole its shards are not registered, and the whole ones are not otherwise;
    these hold the gradients of steps that do not reduce them.
    """
    for each in _sharded_by(part):
        owner, name = each._module_info.module, each._module_info.param_name
        for parameter in (each.sharded_param, getattr(each, "_unsharded_param", None)):
            if parameter is not None and parameter is not owner._parameters.get(name):
                yield owner, name, parameter


def gradients_aside(part: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield owner, name and gradient that ``fully_shard`` adds up for ``part`` before reducing."""
    for each in _sharded_by(part):
        if each.unsharded_accumulated_grad is not None:
            info = each._module_info
            yield info.module, info.param_name, each.unsharded_accumulated_grad


def _sharded_by(part: torch.nn.Module) -> Iterator[Any]:
    """Yield the ``fully_shard`` data of each parameter of the group of ``part``."""
    states = sys.modules.get("torch.distributed._composable_state")
    state: Any = states._get_module_state(part) if states else None
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # one alone, before torch 2.12
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params
