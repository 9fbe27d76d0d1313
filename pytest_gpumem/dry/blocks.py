"""Blocks of torch's allocator on the dry device: their owners, and the time of collections.

A test's reserved bytes must not depend on what earlier tests have left. Blocks that none of its
fixtures holds keep their segments reserved, so the free parts of those segments are filled while
the test runs: its own blocks then get segments as in a new process. Tensors in such blocks are kept
until the test ends.

Autograd's threads, one for each device, hold the last task until they wait for another. A task that
has run for ``torch.autograd.grad`` holds its results (``future_result_`` of
torch/csrc/autograd/graph_task.h). The thread drops it after it has woken the caller
(``Engine::thread_main`` of torch/csrc/autograd/engine.cpp, torch 2.6 to 2.15), which on a busy
machine is after the caller's memory has been read.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_gpumem.measurement.contents import storage_address

_MOST_IN_SMALL = 1 << 20
"""Bytes of the largest block in a segment of small ones (``kSmallSize`` of
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15)."""

_HELD = frozenset({torch.Tensor, torch.nn.Parameter})

_AUTOGRAD = "pt_autograd_"
"""The beginning of the names of autograd's threads, before the index of the device."""

_MOST_TRIES = 100
"""The most parts of fixtures' segments that are taken before one of another segment is."""
_MOST_ROUNDS = 100
"""Rounds of filling: a part from which another one's block was taken is filled in the next."""

BlockNumbers = tuple[int, int]
"""Numbers of blocks: above the first, up to the second."""


class _Hole(NamedTuple):
    """A free part of a segment."""

    start: int
    size: int
    most: int
    """Bytes of the largest block that the allocator takes from it."""
    device: int
    stream: int


class Blocks:
    """The runtime's record of blocks (``source/allocations.c``)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._collect = library.pytest_gpumem_dry_collect
        self._handed_out = library.pytest_gpumem_dry_handed_out
        self._handed_out.restype = ctypes.c_uint64
        self._number = library.pytest_gpumem_dry_number
        self._number.argtypes, self._number.restype = [ctypes.c_void_p], ctypes.c_uint64
        self._function: Any = None

    @property
    def last(self) -> int:
        """The number of the last block that was handed out."""
        return int(self._handed_out())

    def number(self, address: int) -> int:
        """Return the number of the block at ``address``, 0 for none."""
        return int(self._number(address))

    @contextmanager
    def growing(self, by: int, grown: Callable[[], None]) -> Iterator[None]:
        """Call ``grown`` inside, in Python's main thread, whenever there are more ``by`` blocks."""
        before = self._function
        self._function = ctypes.CFUNCTYPE(None)(grown), by
        self.restart_count()
        try:
            yield
        finally:
            self._function = before
            self.restart_count()

    def restart_count(self) -> None:
        """Take the present number of blocks as the start of the count."""
        function, by = self._function or (None, 0)
        self._collect(function, ctypes.c_size_t(by))


class LeftoverBlocks:
    """Blocks that tests have left on the device, while another one runs."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._kept: list[torch.Tensor] = []
        self._known: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """Tensors in a block by its number, as far as they have been looked up."""
        self._filled: dict[int, int] = {}
        """Bytes by address."""

    @property
    def filled(self) -> int:
        """Bytes that are filled now."""
        return sum(self._filled.values())

    def fill(self, spans: Sequence[BlockNumbers]) -> None:
        """Fill the free space beside blocks in none of ``spans``, until :meth:`release`."""
        if not torch.cuda.is_initialized():
            return
        elsewhere: list[int] = []
        grew = False
        for _ in range(_MOST_ROUNDS):
            holes, leftover, segments = self._holes(spans)
            if not holes:
                break
            for hole in holes:
                grew |= self._fill(hole, holes, segments, elsewhere)
        for address in elsewhere:
            torch.cuda.caching_allocator_delete(address)
        if elsewhere or grew:
            torch.cuda.empty_cache()
        self._kept = list(self.tensors_in(leftover))

    def _holes(
        self, spans: Sequence[BlockNumbers]
    ) -> tuple[Sequence[_Hole], set[int], Sequence[tuple[int, int]]]:
        """Return the free parts of segments without a fixture's block, the smallest first.

        With them the blocks of others by number, and all segments by their start and end.
        """
        holes: list[_Hole] = []
        leftover: set[int] = set()
        segments: list[tuple[int, int]] = []
        for segment in torch.cuda.memory_snapshot():
            segments.append((segment["address"], segment["address"] + segment["total_size"]))
            used = [each["address"] for each in segment["blocks"] if each["state"] != "inactive"]
            numbers = {self._blocks.number(one) for one in used if one not in self._filled}
            others = {number for number in numbers if not _is_in(number, spans)}
            leftover |= others
            if others == numbers and used and not segment.get("is_expandable"):
                holes += _holes_of(segment)
        return sorted(holes, key=lambda hole: hole.size), leftover, segments

    def release(self) -> None:
        """Free the filled space, and forget tensors that are kept."""
        self._kept.clear()
        self.empty()

    def empty(self) -> None:
        """Free the filled space."""
        while self._filled:
            address, _ = self._filled.popitem()
            torch.cuda.caching_allocator_delete(address)

    def _fill(
        self,
        hole: _Hole,
        holes: Sequence[_Hole],
        segments: Sequence[tuple[int, int]],
        elsewhere: list[int],
    ) -> bool:
        """Take as much as ``hole`` has of ``holes``, and note what came from ``elsewhere``.

        Stops with ``True`` where there is no such part any more, because blocks for other holes
        have come from it, so that the allocator has made a segment.
        """
        left = hole.size
        tries = 0
        while left and tries < _MOST_TRIES:
            size = min(left, hole.most)
            address = torch.cuda.caching_allocator_alloc(size, hole.device, hole.stream)
            if any(one.start <= address < one.start + one.size for one in holes):
                self._filled[address] = size
                left -= size
                continue
            if not any(start <= address < end for start, end in segments):
                torch.cuda.caching_allocator_delete(address)
                return True
            # The allocator takes the smallest part that has room, even a fixture's.
            elsewhere.append(address)
            tries += 1
        return False

    def tensors_in(self, numbers: Set[int]) -> Iterator[torch.Tensor]:
        """Yield the tensors of Python objects in the blocks ``numbers``, and their gradients."""
        if not numbers <= self._known.keys():
            self._search(numbers)
        for number in numbers:
            for reference in self._known[number]:
                if (found := reference()) is not None:
                    yield found

    def whole_tensors(self, numbers: Set[int]) -> Mapping[int, torch.Tensor]:
        """Return a tensor whose storage is the block of each of these ``numbers``, by number.

        Blocks without one are left out.
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
        """Look up all tensors of Python objects in the blocks ``numbers``, and known ones."""
        self._known = {number: [] for number in numbers | self._known.keys()}
        objects = gc.get_objects()
        # Without a step of Python's for each object, of which there may be millions.
        for one in compress(objects, map(_HELD.__contains__, map(type, objects))):
            self._look_up(one)
            if one.is_leaf and one.grad is not None:
                self._look_up(one.grad)

    def _look_up(self, one: torch.Tensor) -> None:
        if one.is_cuda and one.layout is torch.strided and one.numel():
            self._known.get(self._blocks.number(storage_address(one)), []).append(weakref.ref(one))

    def moved(self, before: int, after: int) -> None:
        """Know the tensors of the block ``before`` as those of the block ``after``."""
        if before in self._known:
            self._known[after] = self._known.pop(before)


def _is_in(number: int, spans: Iterable[BlockNumbers]) -> bool:
    return any(first < number <= last for first, last in spans)


def _holes_of(segment: Mapping[str, Any]) -> Iterator[_Hole]:
    """Yield the free parts of ``segment``, unless it belongs to the pool of a CUDA graph."""
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return
    is_small = segment["segment_type"] == "small"
    for block in segment["blocks"]:
        if block["state"] == "inactive" and (is_small or block["size"] > _MOST_IN_SMALL):
            most = _MOST_IN_SMALL if is_small else block["size"]
            place = segment["device"], segment["stream"]
            yield _Hole(block["address"], block["size"], most, *place)


def wait_for_threads() -> None:
    """Wait until autograd's running threads have dropped their last tasks."""
    for index in _devices():
        with torch.enable_grad():
            # Without elements: nothing is allocated, and no kernel runs.
            leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
            root = leaf.view(0)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (root,), (leaf.detach(),), False, False, (leaf,), allow_unreachable=True
        )


def restart_numbering() -> None:
    """Count the nodes of every thread from zero, as in a new process (``source/numbers.c``)."""
    ctypes.CDLL(None).pytest_gpumem_dry_number_anew()


def _devices() -> Iterator[int]:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):  # it has ended meanwhile, or has no device
            name = (thread / "comm").read_text().strip()
            if name.startswith(_AUTOGRAD):
                yield int(name.removeprefix(_AUTOGRAD))
