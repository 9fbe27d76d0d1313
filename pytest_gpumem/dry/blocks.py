"""Blocks of torch's allocator on the dry device: their owners, and the time of collections.

The free parts of segments that earlier tests have left are filled while a test runs
(:mod:`pytest_gpumem.measurement.leftover`). Tensors in such segments are kept until it ends.

Each of autograd's device threads holds its last task until it waits for the next one. A task of
``torch.autograd.grad`` holds its results (``future_result_`` of torch/csrc/autograd/graph_task.h).
The thread drops the task after it has woken the caller (``Engine::thread_main`` of
torch/csrc/autograd/engine.cpp, torch 2.6 to 2.15): on a busy machine too late for the measurement.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from gc import get_objects  # by name, because code under test may replace the module's functions
from itertools import compress
from typing import Any

import torch

from pytest_gpumem.dry.load import function
from pytest_gpumem.measurement.contents import storage_address
from pytest_gpumem.measurement.leaks import part_of
from pytest_gpumem.measurement.leftover import LeftoverSpace
from pytest_gpumem.simulated.common.patching import Patches

_HELD = frozenset({torch.Tensor, torch.nn.Parameter})

BlockNumbers = tuple[int, int]
"""A range of block numbers: above the first, up to and including the second."""


class Blocks:
    """The runtime's record of blocks (``source/allocations.c``)."""

    def __init__(self) -> None:
        self._collect = function("collect")
        self._handed_out = function("handed_out", gives=ctypes.c_uint64)
        self._number = function("number", ctypes.c_void_p, gives=ctypes.c_uint64)
        self._function: Any = None

    @property
    def last(self) -> int:
        """The number of the last allocated block."""
        return int(self._handed_out())

    def number(self, address: int) -> int:
        """Return the number of the block at ``address``, 0 for none."""
        return int(self._number(address))

    @contextmanager
    def growing(self, by: int, grown: Callable[[], None]) -> Iterator[None]:
        """Call ``grown`` in Python's main thread whenever the number of blocks has grown ``by``."""
        before = self._function
        self._function = ctypes.CFUNCTYPE(None)(grown), by
        self.restart_count()
        try:
            yield
        finally:
            self._function = before
            self.restart_count()

    def restart_count(self) -> None:
        """Count growth from the current number of blocks on."""
        function, by = self._function or (None, 0)
        self._collect(function, ctypes.c_size_t(by))


class LeftoverBlocks(LeftoverSpace):
    """Blocks that earlier tests have left on the device, while another test runs."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks
        self._kept: list[torch.Tensor] = []
        self._known: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """The tensors found in each block, by the block's number."""

    def fill_beside(self, spans: Sequence[BlockNumbers]) -> None:
        """Fill the free space beside blocks outside of all ``spans``, until :meth:`release`."""

        def is_own(address: int) -> bool:
            number = self._blocks.number(address)
            return any(first < number <= last for first, last in spans)

        others = self.fill(is_own)
        self._kept = list(self.tensors_in(set(map(self._blocks.number, others))))

    def release(self) -> None:
        """Free the filled space, and forget tensors that are kept."""
        self._kept.clear()
        self.empty()

    def tensors_in(self, numbers: Set[int]) -> Iterator[torch.Tensor]:
        """Yield the tensors of Python objects in the blocks ``numbers``, and their gradients."""
        if not numbers <= self._known.keys():
            self._search(numbers)
        for number in numbers:
            for reference in self._known[number]:
                if (found := reference()) is not None:
                    yield found

    def whole_tensors(self, numbers: Set[int]) -> Mapping[int, torch.Tensor]:
        """Return for each block in ``numbers`` a tensor whose storage is the whole block.

        Blocks without such a tensor are left out.
        """
        found = self._whole(numbers)
        if found.keys() != numbers:
            self._search(numbers)
            found = self._whole(numbers)
        return found

    def _whole(self, numbers: Set[int]) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for number in numbers:
            for reference in self._known.get(number, ()):
                one = reference()
                if one is None:
                    continue
                is_whole = one.untyped_storage().resizable()
                if is_whole and self._blocks.number(storage_address(one)) == number:
                    found[number] = one
        return found

    def _search(self, numbers: Set[int]) -> None:
        """Find all Python tensors in the blocks ``numbers``, and in blocks found before."""
        self._known = {number: [] for number in numbers | self._known.keys()}
        objects = get_objects()
        # Written without a Python statement per object, of which there may be millions.
        for one in compress(objects, map(_HELD.__contains__, map(type, objects))):
            self._look_up(one)
            if part_of(one, "is_leaf") and one.grad is not None:
                self._look_up(one.grad)

    def _look_up(self, one: torch.Tensor) -> None:
        if one.is_cuda and one.layout is torch.strided and one.numel():
            self._known.get(self._blocks.number(storage_address(one)), []).append(weakref.ref(one))

    def moved(self, before: int, after: int) -> None:
        """Assign the tensors of the block ``before`` to the block ``after``."""
        if before in self._known:
            self._known[after] = self._known.pop(before)


def wait_for_threads() -> None:
    """Wait until autograd's threads have dropped their last tasks, by a further task in each.

    Its node passes a gradient on unchanged, without allocating or running an operator.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    for leaf, root, gradient in _EMPTY_GRAPHS.values():
        engine.run_backward((root,), (gradient,), True, False, (leaf,), True)


_EMPTY_GRAPHS: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
"""A leaf without elements, its alias, and the alias's gradient, by GPU."""


def _make_empty_graphs() -> None:
    """Make the graphs for :func:`wait_for_threads` before a test, whose nodes are numbered."""
    extension: Any = torch._C
    for index in range(torch.cuda.device_count()):
        if index not in _EMPTY_GRAPHS and extension._cuda_hasPrimaryContext(index):
            with torch.enable_grad():
                leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
                root = torch.ops.aten.alias(leaf)
            _EMPTY_GRAPHS[index] = leaf, root, root.detach()


@contextmanager
def passes_dropped() -> Iterator[None]:
    """Make backward passes inside return only after autograd's threads have dropped them.

    Inside another pass, a CUDA graph capture or a profile the wait would be visible; there, only
    release Python's GIL for the threads.
    """

    def run(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return engine(*args, **kwargs)
        finally:
            is_seen = (
                torch._C._current_graph_task_id() != -1
                or torch._C._autograd._profiler_enabled()
                or torch.cuda.is_current_stream_capturing()
            )
            if is_seen:
                time.sleep(0)
            else:
                wait_for_threads()

    patches = Patches()
    for module in (torch.autograd, torch.autograd.graph):
        patches.wrap(module, "_engine_run_backward", run)
    with patches.applied():
        yield


def restart_numbering() -> None:
    """Number the autograd nodes of every thread from zero, as in a new process
    (``source/numbers.c``)."""
    _make_empty_graphs()
    function("number_anew")()
