"""Blocks that one step of a loop leaves for the next one, and the variable that holds them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from pytest_gpumem.measurement.contents import (
    CONTAINERS,
    attributes_of,
    is_a,
    storage_address,
    tensors_in,
)
from pytest_gpumem.measurement.leaks import part_of
from pytest_gpumem.measurement.phases import Positions, position_on
from pytest_gpumem.measurement.recorded import Recorder
from pytest_gpumem.simulated.common.callsite import is_internal

MOST_INSPECTIONS = 5
"""The number of forwards before which live blocks are inspected: the first for the blocks from
before the loop, the second for those that only a first step makes, three more for two growths."""
MOST_HOLDERS = 3
"""The most variables that are named: of two that keep the same, a comparison shows the new one."""
DEEPEST = 3
"""The deepest nesting of containers that is inspected."""

_TEST_PACKAGES = ("_pytest", "pluggy", "pytest_gpumem")
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


_Variable = tuple[str, str, Any]
"""Name, function or module, and value of a variable."""


class _Holder(NamedTuple):
    """A variable that keeps tensors of an earlier step."""

    holder: str
    where: str
    kind: str
    """The type of the variable if it is a container, empty for a tensor."""


class _Kept(NamedTuple):
    """The blocks that a variable keeps, in bytes."""

    nbytes: int
    graph: int
    """The bytes among them that only the autograd graph of its tensors keeps."""
    batches: bool
    """Whether all of them may be batches, of this step or a later one."""


class Carried:
    """Blocks that earlier forwards have left, collected at the beginning of each forward.

    They are blocks allocated after the first forward began, but not by backward. Blocks that
    modules or optimizers hold, and the new batch, do not count.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: set[int] | None = None
        self.end: Positions = ()
        """The positions of the allocators at the end of the last forward."""
        self._forwards = 0
        self._bytes: list[int] = []
        self._seen: list[dict[_Holder, _Kept]] = []
        """The bytes that each holder keeps, at each inspection."""

    def forward(
        self, owned: Callable[[], Iterable[int]], given: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Record the beginning of a forward that is called with ``given``.

        ``owned`` are the addresses that modules and optimizers hold.
        """
        self._forwards += 1
        if self._forwards > MOST_INSPECTIONS:
            return
        device = torch.cuda.current_device()
        held = {
            address: (nbytes, origin) for address, nbytes, origin in self._recorder.held(device)
        }
        if self._first is None:
            self._first = set(held)
            return
        arguments = {storage_address(tensor) for tensor in given()}
        brought, unrecorded = set(), set()
        for address, (_, origin) in held.items():
            # A batch is copied from the host or filled.
            if origin is not None and origin.kind in ("copy", "factory"):
                brought.add(address)
            if origin is None or not origin.has_node:
                unrecorded.add(address)
        # This step's batch is not left by an earlier step.
        since = self._recorder.events(device, position_on(device, self.end))
        made = {event.address for event in since if event.is_alloc}
        batch = made & (brought | unrecorded) | brought & arguments
        kept = {*self._first, *owned(), *batch}
        left = {
            address: nbytes
            for address, (nbytes, origin) in held.items()
            if address not in kept
            and (origin is not None and origin.library is None and origin.node is None)
        }
        self._bytes.append(sum(left.values()))
        self._seen.append(_kept_by_variables(left, brought | arguments) if left else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the bytes left at each inspection, and their largest holders."""
        if not any(self._bytes):
            return {}
        last = next((seen for seen in reversed(self._seen) if seen), {})
        largest = sorted(last, key=lambda one: (-last[one].nbytes, not one.kind, one))
        return {
            "bytes": list(self._bytes),
            "forwards": self._forwards,
            "holders": [
                {
                    **holder._asdict(),
                    "held": [seen[holder].nbytes if holder in seen else 0 for seen in self._seen],
                    "graph": last[holder].graph,
                    "batches": last[holder].batches,
                }
                for holder in largest[:MOST_HOLDERS]
            ],
        }


def _kept_by_variables(left: Mapping[int, int], batches: set[int]) -> dict[_Holder, _Kept]:
    """Return the variables that keep some of the ``left`` blocks, directly or by a graph.

    ``batches`` are the addresses of blocks that may be batches.
    """
    found: dict[_Holder, tuple[set[int], list[torch.Tensor]]] = {}
    for name, where, value in _variables():
        tensors = list(tensors_in(value, DEEPEST))
        addresses = {storage_address(tensor) for tensor in tensors} & left.keys()
        if addresses:
            kind = "" if is_a(value, torch.Tensor) else type(value).__name__
            found[_Holder(name, where, kind)] = addresses, tensors
    unnamed = left.keys() - set().union(*(addresses for addresses, _ in found.values()))
    kept = {}
    for holder, (addresses, tensors) in found.items():
        saved = unnamed and unnamed & set(map(storage_address, saved_by_graphs(tensors)))
        nbytes, graph = (sum(left[one] for one in some) for some in (addresses, saved))
        kept[holder] = _Kept(nbytes + graph, graph, addresses <= batches)
    return kept


def _variables() -> Iterator[_Variable]:
    """Yield the locals of the user's functions on the stack, and the globals of their modules."""
    frame: FrameType | None = sys._getframe(1)
    modules: set[str] = set()
    while frame is not None:
        owner = str(frame.f_globals.get("__name__", ""))
        if owner.partition(".")[0] in _TEST_PACKAGES and modules:
            return
        if not is_internal(frame.f_code.co_filename):
            function = frame.f_code.co_name
            yield from _named(_locals(frame), f"{function}()")
            if owner not in modules:
                modules.add(owner)
                yield from _named(frame.f_globals, owner)
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of ``frame``, without keeping them alive.

    Until Python 3.12 a frame keeps the dictionary that ``f_locals`` returns, and with it values
    that the function releases later.
    """
    shown = frame.f_locals
    found = dict(shown)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        shown.clear()
    return found


def _named(variables: Mapping[str, Any], where: str) -> Iterator[_Variable]:
    for name, value in list(variables.items()):
        if name.startswith("__") or is_a(value, ModuleType, type):
            continue
        if is_a(value, torch.Tensor, *CONTAINERS):
            yield name, where, value
        elif is_a(value, torch.nn.Module):
            for path, module in value.named_modules():
                owner = ".".join(filter(None, (name, path)))
                yield from _attributes(module, owner, where)
        elif not callable(value):
            yield from _attributes(value, name, where)


def _attributes(owner: Any, name: str, where: str) -> Iterator[_Variable]:
    for attribute, value in list(attributes_of(owner).items()):
        if attribute not in _MODULE_DICTS and is_a(value, torch.Tensor, *CONTAINERS):
            yield f"{name}.{attribute}", where, value


MOST_NODES = 20_000
"""The most nodes that are visited: a step of a large model has some thousands."""

_RAW = "_raw_saved_"
"""Prefix of a node's attributes that return a saved tensor without unpacking it
(tools/autograd/gen_autograd_functions.py)."""


def saved_by_graphs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that the graphs of ``tensors`` keep for backward.

    Saved tensors are read without unpacking them, which would run hooks: those of checkpointing
    compute a module again. Tensors packed by hooks, and those that backward has freed, are left
    out. Releases without access to packed tensors yield nothing: 2.6 has none, 2.11 has it.
    """
    queue = [node for tensor in tensors if (node := part_of(tensor, "grad_fn")) is not None]
    seen: set[Any] = set()
    names: dict[type, list[str]] = {}
    while queue and len(seen) < MOST_NODES:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        queue.extend(function for function, _ in node.next_functions if function is not None)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith(_RAW)]
        for name in names[kind]:
            try:
                saved = getattr(node, name)
            except RuntimeError:  # backward has freed the tensors of a Python function
                continue
            yield from _packed(saved)


def _packed(saved: Any) -> Iterator[torch.Tensor]:
    if isinstance(saved, (list, tuple)):
        for one in saved:
            yield from _packed(one)
        return
    data = getattr(saved, "data", None)
    if isinstance(data, torch.Tensor):
        yield data
