"""What still refers to a tensor: a chain of references down to a variable with a name."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_gpumem.measurement.leaks import Places, blocks_reachable
from pytest_gpumem.measurement.statistics import Block

LONGEST_CHAIN = 8
"""References between a tensor and the variable that is named."""
MOST_SEARCHES = 60
"""Objects whose referrers are asked for: each time the whole heap is read."""
MOST_GRAPHS = 200
"""Tensors whose graphs are searched for what autograd has saved."""

_OWN = __name__.partition(".")[0]
_FOREIGN = (_OWN, "_pytest", "pluggy", "pytest", "gc")


def holders_of(blocks: frozenset[Block]) -> dict[int, str]:
    """Return by address what refers to each of the ``blocks``, as far as it can be found.

    ``cache.KEPT[2]`` for a tensor that a global keeps, ``the graph of train.losses[0]`` for one
    that autograd saved.
    """
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    places = Places(blocks)
    found: dict[int, str] = {}
    for tensor in tensors:
        block = places.of(tensor)
        if block and block.address not in found and (name := _name_of(tensor, [tensors])):
            found[block.address] = name
    missing = frozenset(block for block in blocks if block.address not in found)
    graphs = [tensor for tensor in tensors if tensor.grad_fn is not None]
    for tensor in graphs[:MOST_GRAPHS] if missing else ():
        for block in blocks_reachable([tensor], missing):
            if block.address not in found and (name := _name_of(tensor, [tensors, graphs])):
                found[block.address] = f"the graph of {name}"
    return found


def _name_of(value: Any, ignored: list[Any]) -> str | None:
    """Return the expression that leads to ``value`` from a module, a class or a frame."""
    queue: deque[tuple[Any, str, int]] = deque([(value, "", 0)])
    seen = {id(value), id(queue), id(ignored), *map(id, ignored)}
    for _ in range(MOST_SEARCHES):
        if not queue:
            return None
        current, path, length = queue.popleft()
        for referrer in gc.get_referrers(current):
            if id(referrer) in seen or _is_ours(referrer):
                continue
            seen.add(id(referrer))
            if name := _named(referrer, current):
                return f"{name}{path}"
            step = _step(referrer, current)
            if step is not None and length < LONGEST_CHAIN:
                queue.append((referrer, f"{step}{path}", length + 1))
    return None


def _step(referrer: Any, value: Any) -> str | None:
    """Return how ``referrer`` refers to ``value``: ``.attribute`` or ``[index]``."""
    if isinstance(referrer, dict):
        key = next((key for key, held in referrer.items() if held is value), None)
        return None if key is None else f"[{key!r}]"
    if isinstance(referrer, (list, tuple)):
        index = next((i for i, held in enumerate(referrer) if held is value), None)
        return None if index is None else f"[{index}]"
    if isinstance(referrer, types.CellType):
        return ""
    attributes = getattr(referrer, "__dict__", None)
    if isinstance(attributes, Mapping):
        if attributes is value:
            return ""
        name = next((name for name, held in attributes.items() if held is value), None)
        return None if name is None else f".{name}"
    return "" if isinstance(referrer, (types.FrameType, set, frozenset, deque)) else None


def _named(referrer: Any, value: Any) -> str | None:
    """Return the variable of a module, class, frame or function by which ``value`` is known."""
    if isinstance(referrer, types.FrameType):
        names = [name for name, held in referrer.f_locals.items() if held is value]
        return f"{names[0]} in {referrer.f_code.co_name}()" if names else None
    if not isinstance(referrer, dict):
        return None
    for owner in _owners(referrer):
        name = next((key for key, held in referrer.items() if held is value), None)
        if name is not None:
            return f"{owner}.{name}"
    return None


def _owners(namespace: dict[Any, Any]) -> Iterator[str]:
    module = namespace.get("__name__")
    if isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is namespace:
        yield module
    elif isinstance(module, str) and "__builtins__" in namespace:
        yield module  # a module that is no longer imported, as pytest's rewriting leaves them
    for referrer in gc.get_referrers(namespace):
        if isinstance(referrer, type):
            yield f"{referrer.__module__}.{referrer.__qualname__}"


def _is_ours(value: Any) -> bool:
    if isinstance(value, types.FrameType):
        return str(value.f_globals.get("__name__", "")).startswith(_FOREIGN)
    return type(value).__module__.partition(".")[0] in _FOREIGN
