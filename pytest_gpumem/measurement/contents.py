"""The contents of the user's objects, read without running the user's code.

Reading the values of a mapping may import modules, and the ``__class__`` of a proxy may be computed
from an object that does not exist yet. So containers are read by the methods of the built-in type
that they derive from, and types are read by ``type()``.

Sources of sharded parameters: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (``FSDPParam``),
_fsdp_state.py, torch/distributed/_composable_state.py and torch/utils/_python_dispatch.py, torch
2.6 to 2.13.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_ITEMS = 10_000
"""The most items of a container that are read."""

_ITEMS: dict[type, Callable[[Any], Iterable[tuple[Any, Any]]]] = {
    dict: dict.items,
    list: lambda container: enumerate(list.__iter__(container)),
    tuple: lambda container: enumerate(tuple.__iter__(container)),
    set: lambda container: enumerate(set.__iter__(container)),
    deque: lambda container: enumerate(deque.__iter__(container)),
    UserDict: lambda container: attributes_of(container).get("data", {}).items(),
}
CONTAINERS = tuple(_ITEMS)


def is_a(value: Any, *kinds: type) -> bool:
    """Return whether the type of ``value`` derives from one of ``kinds``."""
    return issubclass(type(value), kinds)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of the instance ``value``, without its class's; empty for none."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if is_a(found, dict, MappingProxyType) else {}


def items_of(container: Any, most: int | None = None) -> list[tuple[Any, Any]]:
    """Return at most ``most`` keys or indices of a container, with their values.

    The result is empty for an object that is no container.
    """
    read = next((items for kind, items in _ITEMS.items() if is_a(container, kind)), None)
    return [] if read is None else list(islice(read(container), most))


def tensors_in(value: Any, levels: int) -> Iterator[torch.Tensor]:
    """Yield ``value`` if it is a tensor, and those in containers nested up to ``levels`` deep."""
    if is_a(value, torch.Tensor):
        yield value
    elif levels:
        for _, item in items_of(value, MOST_ITEMS):
            yield from tensors_in(item, levels - 1)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str, Any]]:
    """Yield key, name and value of each entry in the state of ``optimizer``.

    The key is a parameter, or, in optimizers of libraries, the name of a number or tensor.
    """
    for key, held in items_of(optimizer.state):
        if is_a(held, *CONTAINERS):
            yield from ((key, str(name), value) for name, value in items_of(held))
        else:
            yield key, str(key) if is_a(key, str) else "state", held


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor`` on a GPU; 0 where there is none.

    A sparse tensor has no storage, a lazy module's parameter no shape yet, and reading a tensor of
    a compiled graph raises an error once a replay has overwritten it.
    """
    try:
        return tensor.untyped_storage().data_ptr() if tensor.is_cuda else 0
    except (NotImplementedError, RuntimeError, ValueError):
        return 0


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the memory of ``tensor``: of a DTensor, its local tensor."""
    whole: Any = tensor
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(whole):
        yield tensor
        return
    names, _ = whole.__tensor_flatten__()
    for name in names:
        part = getattr(whole, name)
        if isinstance(part, torch.Tensor):
            yield from parts_of(part)


def sharded_parameters(
    part: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield owner, name and parameter of the unregistered parameters of a ``fully_shard`` module.

    While ``part`` is unsharded, these are its shards. Otherwise they are the unsharded parameters,
    which hold the gradients of steps without gradient reduction.
    """
    for each in _sharded_by(part):
        owner, name = each._module_info.module, each._module_info.param_name
        for parameter in (each.sharded_param, getattr(each, "_unsharded_param", None)):
            if parameter is not None and parameter is not owner._parameters.get(name):
                yield owner, name, parameter


def accumulated_gradients(
    part: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield owner, name and gradient that ``fully_shard`` adds up for ``part`` before reducing."""
    for each in _sharded_by(part):
        if each.unsharded_accumulated_grad is not None:
            info = each._module_info
            yield info.module, info.param_name, each.unsharded_accumulated_grad


def _sharded_by(part: torch.nn.Module) -> Iterator[Any]:
    """Yield the ``FSDPParam`` of each parameter in the groups of ``part``."""
    states = sys.modules.get("torch.distributed._composable_state")
    state: Any = states._get_module_state(part) if states else None
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # a single group, before torch 2.12
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params
