"""Blocks that one step of a loop leaves for the next one, and the variable that holds them."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from pytest_gpumem.attribution.history import Origin
from pytest_gpumem.measurement.leaks import graph_of
from pytest_gpumem.simulated.common.callsite import is_internal

Held = Callable[[], Iterable[tuple[int, int, Origin | None]]]
"""A function returning address, bytes and origin of every live block."""

LOOKS = 5
"""The number of forwards at whose beginning live blocks are inspected."""
MOST_ITEMS = 10_000
"""The most items of a container that are inspected."""
DEEPEST = 3
"""The deepest nesting of containers that is inspected."""

_TESTERS = ("_pytest", "pluggy", "pytest_gpumem")
_CONTAINERS = (list, dict, tuple, set, deque)
_OF_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Variable:
    """A variable of a running function, or of its module."""

    name: str
    where: str
    value: Any


class _Holder(NamedTuple):
    """A variable that keeps tensors of an earlier step."""

    holder: str
    where: str
    kind: str
    """The type of the variable if it is a container, empty for a tensor."""
    graph: bool
    """Whether tensors in it keep the graph that computed them."""


class Carried:
    """Blocks that earlier forwards have left, collected at the beginning of each forward.

    These are blocks made since the first one began, and by no backward, that no module and no
    optimizer holds.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._first: set[int] | None = None
        self._forwards = 0
        self._bytes: list[int] = []
        self._seen: list[dict[_Holder, int]] = []
        """The bytes by holder, at each inspection."""

    def forward(self, known: Callable[[], Iterable[int]]) -> None:
        """Record the beginning of a forward; ``known`` are addresses of modules and optimizers."""
        self._forwards += 1
        if self._forwards > LOOKS:
            return
        if self._first is None:
            self._first = {address for address, _, _ in self._held()}
            return
        owned = {*self._first, *known()}
        left = {
            address: nbytes
            for address, nbytes, origin in self._held()
            if address not in owned and _of_forward(origin)
        }
        self._bytes.append(sum(left.values()))
        self._seen.append(_holders_of(left) if left else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the left bytes at each inspection, and their largest holder."""
        if not any(self._bytes):
            return {}
        last = next((seen for seen in reversed(self._seen) if seen), {})
        if not last:
            return {"bytes": list(self._bytes)}
        holder = max(last, key=lambda one: (last[one], bool(one.kind)))
        amounts = [seen.get(holder, 0) for seen in self._seen]
        return {"bytes": list(self._bytes), **holder._asdict(), "held": amounts}


def _of_forward(origin: Origin | None) -> bool:
    return origin is not None and origin.library is None and origin.node is None


def _holders_of(left: Mapping[int, int]) -> dict[_Holder, int]:
    """Return the variables that hold some of the ``left`` blocks, and their bytes.

    Graphs are not walked: reading a node's saved tensors runs the hooks that unpack them, which
    under checkpointing compute a module again.
    """
    found: dict[_Holder, int] = {}
    for variable in _variables():
        tensors = list(_tensors(variable.value, DEEPEST))
        graphs = [tensor for tensor in tensors if graph_of(tensor) is not None]
        addresses = {_address(tensor) for tensor in tensors} & left.keys()
        nbytes = sum(left[address] for address in addresses)
        several = isinstance(variable.value, _CONTAINERS)
        if nbytes:
            kind = type(variable.value).__name__ if several else ""
            found[_Holder(variable.name, variable.where, kind, bool(graphs))] = nbytes
    return found


def _variables() -> Iterator[_Variable]:
    """Yield the variables of the user's functions that run, and of their modules."""
    frame: FrameType | None = sys._getframe(1)
    modules: set[str] = set()
    while frame is not None:
        owner = str(frame.f_globals.get("__name__", ""))
        if owner.partition(".")[0] in _TESTERS and modules:
            return
        if not is_internal(frame.f_code.co_filename):
            function = frame.f_code.co_name
            yield from _named(_locals(frame), f"{function}()")
            if owner not in modules:
                modules.add(owner)
                yield from _named(frame.f_globals, owner)
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of ``frame``, without making it keep them alive.

    Until Python 3.12 a frame keeps the dictionary that it returns, and so values that the
    function has released since.
    """
    shown = frame.f_locals
    found = dict(shown)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        shown.clear()
    return found


def _named(variables: Mapping[str, Any], where: str) -> Iterator[_Variable]:
    for name, value in list(variables.items()):
        if name.startswith("__") or isinstance(value, (ModuleType, type)):
            continue
        if isinstance(value, (torch.Tensor, *_CONTAINERS)):
            yield _Variable(name, where, value)
        elif isinstance(value, torch.nn.Module):
            for path, module in value.named_modules():
                owner = ".".join(filter(None, (name, path)))
                yield from _attributes(module, owner, where)
        elif hasattr(value, "__dict__") and not callable(value):
            yield from _attributes(value, name, where)


def _attributes(owner: Any, name: str, where: str) -> Iterator[_Variable]:
    for attribute, value in list(vars(owner).items()):
        if attribute not in _OF_MODULES and isinstance(value, (torch.Tensor, *_CONTAINERS)):
            yield _Variable(f"{name}.{attribute}", where, value)


def _tensors(value: Any, levels: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif levels and isinstance(value, dict):
        yield from _each(list(value.values()), levels)
    elif levels and isinstance(value, _CONTAINERS):
        yield from _each(list(value), levels)


def _each(values: Sequence[Any], levels: int) -> Iterator[torch.Tensor]:
    for value in values[:MOST_ITEMS]:
        yield from _tensors(value, levels - 1)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() if tensor.is_cuda else 0
    except (NotImplementedError, RuntimeError, ValueError):
        return 0
