"""Leaks of a test: new blocks that its fixtures do not hold, and the variables that keep them."""

from __future__ import annotations

import sys
import types
import warnings
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from gc import get_objects, get_referents  # by name: code under test may replace the module's
from typing import Any, NamedTuple

import torch

from pytest_gpumem.measurement.contents import CONTAINERS, attributes_of, is_a, items_of
from pytest_gpumem.measurement.statistics import Block
from pytest_gpumem.quoting import quoted
from pytest_gpumem.values.errors import UnknownValueError

MOST_OBJECTS = 1_000_000
"""The most objects visited from a fixture: a larger graph is not that of its value only."""

_NOT_ENTERED = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes, int, float)
"""Types whose references are not followed, because they lead to everything or to nothing."""

_FOREIGN = ("_pytest", "pytest", "pluggy", "pytest_gpumem", "xdist", "gc")
"""Packages whose objects refer to the whole session, and so to values of other tests."""


def leaked_blocks(
    before: frozenset[Block], after: frozenset[Block], roots: Iterable[Any]
) -> frozenset[Block]:
    """Return the blocks of ``after`` that are not in ``before`` nor held by ``roots``."""
    new = after - before
    return new - blocks_reachable(roots, new) if new else new


def blocks_reachable(roots: Iterable[Any], blocks: frozenset[Block]) -> frozenset[Block]:
    """Return the ``blocks`` that contain tensors reachable from ``roots``.

    References are followed through attributes, containers, closures and autograd graphs.
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
            # A sparse tensor, one without a storage, or a lazy module's parameter.
            return None
        index = bisect_right(self._addresses, pointer) - 1
        if index < 0:
            return None
        block = self._ordered[index]
        return block if pointer < block.address + block.size else None


def reachable_objects(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield ``roots`` and the objects reachable from them, but none through classes or modules."""
    queue = list(roots)
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
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
    """Return the arguments and class attributes of ``item``, which may hold memory after its body.

    ``fixtures`` are the values of its fixtures.
    """
    values = [*fixtures, *getattr(item, "funcargs", {}).values()]
    instance = getattr(item, "instance", None)
    return values if instance is None else [*values, instance, *holders_of_class(type(instance))]


def part_of(value: Any, name: str) -> Any:
    """Return an attribute of a tensor or node, ``None`` if torch raises an error.

    torch does for some kinds of tensors, for parts that backward has freed, and for the graph of a
    view that is one of several outputs of a function, after its base was modified in place
    (``handle_view_on_rebase`` in torch/csrc/autograd/variable.cpp).
    """
    try:
        return getattr(value, name, None)
    except RuntimeError:
        return None


def _referents(value: Any) -> Iterable[Any]:
    if is_a(value, types.FunctionType):
        # Its globals would lead everywhere.
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    found = get_referents(value)
    # References held by C++, which the garbage collector does not see.
    if is_a(value, torch.Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about .grad of a non-leaf tensor
            found += [part_of(value, name) for name in ("grad", "_base", "grad_fn")]
        if value.layout is torch.sparse_coo:
            found += [value._indices(), value._values()]
    elif is_a(value, torch.autograd.graph.Node):
        found += [function for function, _ in value.next_functions]
        saved = [name for name in dir(value) if name.startswith("_saved_")]
        found += [part_of(value, name) for name in ("variable", *saved)]
    return found


CHUNK = 128
"""The number of objects examined by one call: most groups have no relevant reference."""


class Referrers:
    """The objects of the heap when this was made, and the references between them."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        starts = range(0, len(objects), CHUNK)
        self._chunks = [objects[start : start + CHUNK] for start in starts]
        self._referents = [get_referents(*chunk) for chunk in self._chunks]
        self.found: dict[int, list[Any]] = {}
        """The objects that refer to a value given to :meth:`find`, by the value's id."""
        self._keys: dict[int, dict[int, Any]] = {}
        self._opened: list[Any] = []

    def tensors(self) -> list[Any]:
        """Return the tensors of the heap."""
        return list(filter(holds_memory, self._objects))

    def find(self, values: Iterable[Any]) -> None:
        """Find the objects that refer to any of ``values``."""
        wanted = {id(value) for value in values} - self.found.keys()
        if not wanted:
            return
        self.found.update((key, []) for key in wanted)
        for chunk, referents in zip(self._chunks, self._referents, strict=True):
            if not wanted.isdisjoint(map(id, referents)):
                for referrer in chunk:
                    for key in wanted.intersection(map(id, get_referents(referrer))):
                        self.found[key].append(referrer)
        for owner in self._opened:
            for key in wanted & self._keys[id(owner)].keys():
                self.found[key].append(owner)

    def key(self, owner: Any, value: Any) -> Any:
        """Return the first key, index or attribute name of ``value`` in ``owner``, or ``None``.

        Python may create an object's ``__dict__`` only when it is read; from then on the object
        refers to its attributes only through that dictionary.
        """
        keys = self._keys.get(id(owner))
        if keys is None:
            keys = self._keys[id(owner)] = {}
            items: Iterable[tuple[Any, Any]] = items_of(owner)
            if not is_a(owner, *CONTAINERS):
                items = attributes_of(owner).items()
                self._opened.append(owner)
            for key, held in items:
                keys.setdefault(id(held), key)
        return keys.get(id(value))


def holds_memory(value: Any) -> bool:
    """Return whether ``value`` is a tensor, but not one of torch's fake tensors."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) and kind.__module__ != "torch._subclasses.fake_tensor"


LONGEST_CHAIN = 8
"""The most references between a tensor and the variable that is named."""
MOST_SEARCHES = 200
"""The most objects whose referrers are followed in the search from one tensor."""
MOST_GRAPHS = 200
"""The most tensors whose graphs are searched for saved tensors."""


def holder_names(blocks: frozenset[Block]) -> dict[int, str]:
    """Return the expressions that refer to ``blocks``, by address, as far as they can be found.

    ``cache.KEPT[2]`` for a tensor that a global keeps, ``cache.WEIGHT.grad`` for a gradient, and
    ``the graph of train.losses[0]`` for one that autograd saved.
    """
    heap = Referrers(get_objects())  # the list does not contain itself, which would be a cycle
    tensors = heap.tensors()
    blocks_of = BlockLookup(blocks)
    at: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    of_gradient: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if block := blocks_of.block_of(tensor):
            at[block.address].append(tensor)
        gradient = part_of(tensor, "grad") if part_of(tensor, "is_leaf") else None
        if gradient is not None and (block := blocks_of.block_of(gradient)):
            of_gradient[block.address].append(tensor)
    leaves = _holder_names(heap, of_gradient)
    gradients = {address: f"{name}.grad" for address, name in leaves.items()}
    found = gradients | _holder_names(heap, at)
    missing = frozenset(block for block in blocks if block.address not in found)
    graphs = [tensor for tensor in tensors if part_of(tensor, "grad_fn")] if missing else []
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
    """An object that leads to a tensor, and the expression from the object to the tensor."""

    value: Any
    path: tuple[str, ...] = ()
    key: object = None
    """The key of the path's first step, if ``value`` is a dictionary (perhaps a ``__dict__``)."""

    @property
    def as_attribute(self) -> str:
        """The path that begins at the object whose ``__dict__`` is ``value``."""
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
            for referrer in heap.found[id(link.value)]:
                if id(referrer) in self._seen or _is_excluded(referrer):
                    continue
                self._seen.add(id(referrer))
                self.name = _holder_expression(heap, referrer, link)
                if self.name is not None:
                    self.frontier = []
                    return
                if following := _next_link(heap, referrer, link):
                    self.frontier.append(following)


def _next_link(heap: Referrers, referrer: Any, link: _Link) -> _Link | None:
    """Return the link of ``referrer``; ``None`` for a class or module, or if it holds only a key.

    A set, a closure, a partial, a generator or an ``lru_cache`` has no expression for its parts, so
    the path ends at the object itself.
    """
    value, path, _ = link
    if is_a(referrer, type, types.ModuleType):
        return None
    key = heap.key(referrer, value)
    if is_a(referrer, dict, list, tuple, deque):
        # The text of a tensor would read the device.
        text = "..." if holds_memory(key) else quoted(key)
        return None if key is None else _Link(referrer, (f"[{text}]", *path), key)
    if attributes_of(referrer) is value:
        return _Link(referrer, (link.as_attribute,))
    return _Link(referrer, (f".{key}", *path)) if isinstance(key, str) else _Link(referrer)


def _holder_expression(heap: Referrers, referrer: Any, link: _Link) -> str | None:
    """Return the complete expression if ``referrer`` is a module's globals, a class or a frame."""
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
    # A module that is no longer in sys.modules, such as a conftest that pytest imported again.
    return module if "__builtins__" in namespace else None


def _is_excluded(value: Any) -> bool:
    if is_a(value, types.FrameType):
        return str(value.f_globals.get("__name__", "")).startswith(_FOREIGN)
    return type(value).__module__.partition(".")[0] in _FOREIGN
