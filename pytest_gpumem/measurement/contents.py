"""The contents of objects of the user, read without running the user's code.

A mapping may import modules when its values are asked for, a proxy may compute its ``__class__``
from an object that is not there yet. So containers are read by the methods of the built-in type
that they derive from, and kinds are told by ``type()``.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch

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
    """Return the attributes that ``value`` has itself; empty for an object without any."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if is_a(found, dict, MappingProxyType) else {}


def items_of(container: Any, most: int | None = None) -> list[tuple[Any, Any]]:
    """Return the keys or indices of a container with their values, the first ``most`` of them.

    Empty for anything else.
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
