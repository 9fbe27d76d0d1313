"""Leaks of a test: blocks that stay alive and are not held by the test's own set-up."""

from __future__ import annotations

import gc
import types
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pytest_gpumem.measurement.contents import is_a, items_of
from pytest_gpumem.measurement.statistics import Block
from pytest_gpumem.values.errors import UnknownValueError

MOST_OBJECTS = 1_000_000
"""The most objects of a walk: a larger heap is no longer a fixture's own."""

_NOT_ENTERED = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes, int, float)
"""Types whose references are not followed, because they lead to everything or to nothing."""

_FOREIGN = ("_pytest", "pytest", "pluggy", "pytest_gpumem", "xdist")
"""Packages whose objects lead to the whole session, and so to values of other tests."""


def leaked_blocks(
    before: frozenset[Block], after: frozenset[Block], roots: Iterable[Any]
) -> frozenset[Block]:
    """Return the blocks of ``after`` that are not in ``before`` nor held by ``roots``."""
    new = after - before
    return new - blocks_reachable(roots, new) if new else new


def blocks_reachable(roots: Iterable[Any], blocks: frozenset[Block]) -> frozenset[Block]:
    """Return the ``blocks`` that contain tensors reachable from ``roots``.

    They are reached by attributes, containers, closures and graphs.
    """
    blocks_of = BlockLookup(blocks)
    found = map(blocks_of.block_of, filter(holds_memory, reachable_objects(roots)))
    return frozenset(block for block in found if block is not None)


class BlockLookup:
    """A lookup of the block that a tensor lies in."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ordered = sorted(blocks, key=lambda block: block.address)
        self._addresses = [block.address for block in self._ordered]

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block of ``tensor``, ``None`` where it is in none of them."""
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, UnknownValueError, ValueError):
            # Sparse, without a storage, a copy on the host, or a lazy module's parameter, which has
            # no shape yet and no memory.
            return None
        index = bisect_right(self._addresses, pointer) - 1
        if index < 0:
            return None
        block = self._ordered[index]
        return block if pointer < block.address + block.size else None


def reachable_objects(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects that ``roots`` hold, and themselves, but not generally shared ones."""
    queue = list(roots)
    seen: dict[int, Any] = {}  # keeps the objects: while one lives its id is its own
    while queue and len(seen) < MOST_OBJECTS:
        value = queue.pop()
        if id(value) in seen or value is None:
            continue
        seen[id(value)] = value
        if type(value).__module__.partition(".")[0] in _FOREIGN:
            continue
        yield value
        if not is_a(value, *_NOT_ENTERED):
            queue.extend(_referents(value))


def holders_of_class(cls: type) -> list[Any]:
    """Return the models, optimizers and tensors that ``setUpClass`` and the like left on ``cls``.

    A container on a class is no holder: one that grows from test to test is a leak.
    """
    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    attributes = [value for base in cls.__mro__ for value in vars(base).values()]
    return [value for value in attributes if is_a(value, *kinds)]


def values_given(fixtures: Iterable[Any], item: Any) -> list[Any]:
    """Return the values that pytest's ``item`` was given, which may keep memory after its body.

    ``fixtures`` are those of its fixtures.
    """
    values = [*fixtures, *getattr(item, "funcargs", {}).values()]
    instance = getattr(item, "instance", None)
    return values if instance is None else [*values, instance, *holders_of_class(type(instance))]


def graph_of(tensor: torch.Tensor) -> Any:
    """Return ``tensor.grad_fn``; ``None``, too, for a view whose graph was lost.

    torch raises an error there: one of several outputs of a function, whose base was overwritten
    (``handle_view_on_rebase`` in torch/csrc/autograd/variable.cpp).
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _referents(value: Any) -> Iterable[Any]:
    if is_a(value, torch.Tensor):
        return [*gc.get_referents(value), *_tensor_parts(value)]
    if is_a(value, torch.autograd.graph.Node):
        return [*gc.get_referents(value), *_node_parts(value)]
    if is_a(value, types.FunctionType):
        # Its globals would lead everywhere.
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _tensor_parts(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield a tensor's references in C++, which the garbage collector does not see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # .grad of a tensor that is no leaf
        for name in ("grad", "_base", "grad_fn"):
            try:
                yield getattr(tensor, name)
            except RuntimeError:  # a tensor of a kind that has no such part
                continue
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())


def _node_parts(node: Any) -> Iterator[Any]:
    yield from (function for function, _ in node.next_functions)
    yield getattr(node, "variable", None)
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                yield getattr(node, name)
            except RuntimeError:  # freed: the graph has been run backward
                continue


CHUNK = 128
"""The number of objects examined together: most have no relevant reference."""


class Referrers:
    """The heap at one moment; objects that are made later are not in it."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        starts = range(0, len(objects), CHUNK)
        self._chunks = [objects[start : start + CHUNK] for start in starts]
        self._referents = [gc.get_referents(*chunk) for chunk in self._chunks]
        self._found: dict[int, list[Any]] = {}
        self._keys: dict[int, dict[int, Any]] = {}

    @classmethod
    def now(cls) -> Referrers:
        """Return the current heap."""
        # Called before there is an instance, or it would refer to itself and outlive its use.
        return cls(gc.get_objects())

    def tensors(self) -> list[Any]:
        """Return the tensors of the heap."""
        return list(filter(holds_memory, self._objects))

    def find(self, values: Iterable[Any]) -> None:
        """Find the objects that refer to any of ``values``."""
        wanted = {id(value) for value in values} - self._found.keys()
        if not wanted:
            return
        self._found.update((key, []) for key in wanted)
        for chunk, referents in zip(self._chunks, self._referents, strict=True):
            if not wanted.isdisjoint(map(id, referents)):
                for referrer in chunk:
                    for key in wanted.intersection(map(id, gc.get_referents(referrer))):
                        self._found[key].append(referrer)

    def referring_to(self, value: Any) -> list[Any]:
        """Return the objects that refer to ``value``, which :meth:`find` was given."""
        return self._found[id(value)]

    def key(self, container: Any, value: Any) -> Any:
        """Return the first key or index under which ``container`` has ``value``, or ``None``."""
        keys = self._keys.get(id(container))
        if keys is None:
            keys = self._keys[id(container)] = {}
            for key, held in items_of(container):
                keys.setdefault(id(held), key)
        return keys.get(id(value))


def holds_memory(value: Any) -> bool:
    """Return whether ``value`` is a tensor, but none that torch's compilers keep for its shape."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) and kind.__module__ != "torch._subclasses.fake_tensor"
