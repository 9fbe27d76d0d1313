"""The references to a tensor: a chain that leads to it from a variable with a name."""

from __future__ import annotations

import sys
import types
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pytest_gpumem.measurement.contents import attributes_of, is_a
from pytest_gpumem.measurement.leaks import BlockLookup, Referrers, blocks_reachable, graph_of
from pytest_gpumem.measurement.statistics import Block

LONGEST_CHAIN = 8
"""The most references between a tensor and the variable that is named."""
MOST_SEARCHES = 60
"""The most objects whose referrers are followed, from one tensor."""
MOST_GRAPHS = 200
"""The most tensors whose graphs are searched for saved tensors."""

_OWN = __name__.partition(".")[0]
_FOREIGN = (_OWN, "_pytest", "pluggy", "pytest", "gc")


def holder_names(blocks: frozenset[Block]) -> dict[int, str]:
    """Return the expressions that refer to ``blocks``, by address, as far as they can be found.

    ``cache.KEPT[2]`` for a tensor that a global keeps, ``the graph of train.losses[0]`` for one
    that autograd saved.
    """
    heap = Referrers.now()
    tensors = heap.tensors()
    blocks_of = BlockLookup(blocks)
    at: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if block := blocks_of.block_of(tensor):
            at[block.address].append(tensor)
    found = _holder_names(heap, at)
    missing = frozenset(block for block in blocks if block.address not in found)
    graphs = [tensor for tensor in tensors if graph_of(tensor)] if missing else []
    in_graphs: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in graphs[:MOST_GRAPHS]:
        for block in blocks_reachable([tensor], missing):
            in_graphs[block.address].append(tensor)
    names = _holder_names(heap, in_graphs)
    return {**found, **{address: f"the graph of {name}" for address, name in names.items()}}


def _holder_names(heap: Referrers, groups: Mapping[int, list[torch.Tensor]]) -> dict[int, str]:
    """Return for each group the name of its first tensor that has one."""
    tensors = {id(tensor): tensor for group in groups.values() for tensor in group}
    searches = {key: _Search(tensor) for key, tensor in tensors.items()}
    for _ in range(LONGEST_CHAIN):
        under_way = [search for search in searches.values() if search.frontier]
        if not under_way:
            break
        heap.find(link.value for search in under_way for link in search.frontier)
        for search in under_way:
            search.advance(heap)
    names: dict[int, str] = {}
    for address, group in groups.items():
        found = [name for tensor in group if (name := searches[id(tensor)].name)]
        names.update((address, name) for name in found[:1])
    return names


class _Link(NamedTuple):
    """An object on the way from a tensor to a variable, and its path to the tensor."""

    value: Any
    path: tuple[str, ...] = ()
    key: object = None
    """The key of the path's first step, where ``value`` is a dictionary, perhaps of attributes."""

    @property
    def as_attribute(self) -> str:
        """The path from the object whose attributes ``value`` is."""
        return "".join((f".{self.key}", *self.path[1:]))


class _Search:
    """The search for a variable that leads to one tensor, level by level."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.name: str | None = None
        self.frontier = [_Link(tensor)]
        self._seen = {id(tensor)}
        self._left = MOST_SEARCHES

    def advance(self, heap: Referrers) -> None:
        """Replace the frontier by the objects that refer to it, or find the name."""
        links, self.frontier = self.frontier[: self._left], []
        self._left -= len(links)
        for link in links:
            for referrer in heap.referring_to(link.value):
                if id(referrer) in self._seen or _is_ours(referrer):
                    continue
                self._seen.add(id(referrer))
                self.name = _holder_expression(heap, referrer, link)
                if self.name is not None:
                    self.frontier = []
                    return
                if following := _followed(heap, referrer, link):
                    self.frontier.append(following)


def _followed(heap: Referrers, referrer: Any, link: _Link) -> _Link | None:
    """Return the link of ``referrer``, ``None`` where its path cannot be named."""
    value, path, _ = link
    if is_a(referrer, dict):
        key = heap.key(referrer, value)
        return None if key is None else _Link(referrer, (f"[{key!r}]", *path), key)
    if is_a(referrer, list, tuple):
        index = heap.key(referrer, value)
        return None if index is None else _Link(referrer, (f"[{index}]", *path))
    if is_a(referrer, types.CellType):
        return _Link(referrer, path)
    if attributes := attributes_of(referrer):
        if attributes is value:
            return _Link(referrer, (link.as_attribute,))
        name = next((name for name, held in attributes.items() if held is value), None)
        return None if name is None else _Link(referrer, (f".{name}", *path))
    followed = is_a(referrer, types.FrameType, set, frozenset, deque)
    return _Link(referrer, path) if followed else None


def _holder_expression(heap: Referrers, referrer: Any, link: _Link) -> str | None:
    """Return the expression that begins with a module, class or frame, if ``referrer`` is one."""
    value, path, key = link
    if is_a(referrer, types.FrameType):
        names = [name for name, held in referrer.f_locals.items() if held is value]
        return f"{names[0]} in {referrer.f_code.co_name}(){''.join(path)}" if names else None
    if is_a(referrer, type) and is_a(value, dict) and isinstance(key, str):
        return f"{referrer.__module__}.{referrer.__qualname__}{link.as_attribute}"
    if is_a(referrer, dict) and (owner := _module(referrer)):
        name = heap.key(referrer, value)
        return None if name is None else f"{owner}.{name}{''.join(path)}"
    return None


def _module(namespace: dict[Any, Any]) -> str | None:
    """Return the module whose variables ``namespace`` holds, ``None`` if it is no module's."""
    module = namespace.get("__name__")
    if not isinstance(module, str):
        return None
    if getattr(sys.modules.get(module), "__dict__", None) is namespace:
        return module
    # A module that is no longer imported, as pytest's rewriting leaves them.
    return module if "__builtins__" in namespace else None


def _is_ours(value: Any) -> bool:
    if is_a(value, types.FrameType):
        return str(value.f_globals.get("__name__", "")).startswith(_FOREIGN)
    return type(value).__module__.partition(".")[0] in _FOREIGN
