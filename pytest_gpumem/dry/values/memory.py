"""The device's memory as CPU tensors, and the runtime's record of known values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

MemoryRange = tuple[int, int]
"""Address and bytes of a block on the device."""

_OnUnknownRead = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)

_listening: list[tuple[Any, bool, bool]] = []
"""Listeners of reads, whether copies of any size bring values, and whether operators are followed;
the last one is active."""


class Memory:
    """The functions of ``source/values.c``."""

    def __init__(self, on_unknown_read: Callable[[int], type[BaseException] | None]) -> None:
        """Call ``on_unknown_read`` for each read of unknown values, with its bytes.

        The error class that it returns is raised where the thread comes back to Python. Keep a
        reference to it.
        """
        library = ctypes.CDLL(None)

        def function(name: str, *arguments: Any, gives: Any = ctypes.c_int) -> Any:
            found = getattr(library, f"pytest_gpumem_dry_{name}")
            found.argtypes, found.restype = arguments or None, gives
            return found

        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._knows = function("knows", pointer, size)
        self._know = function("know", pointer, size)
        self._forget = function("forget", pointer, size)
        self._holds = function("holds", pointer, size)
        self._answer = function("answer", pointer, size)
        self._block = function("block", pointer, gives=size)
        self._watch = function("watch", pointer, gives=ctypes.c_uint64)
        self._dead = function("dead", gives=pointer)
        self._reduction, self._tell = function("reduction"), function("tell")
        self._copy_all, self._follow = function("copy_all"), function("follow")

        def told_in_c(size: int) -> int | None:
            kind = on_unknown_read(size)
            return None if kind is None else id(kind)

        self._told = _OnUnknownRead(told_in_c)

    def begin(self, *, everything: bool, followed: bool) -> None:
        """Listen to reads from now on; with ``everything``, copies of any size bring values."""
        _listening.append((self._told, everything, followed))
        self._listen()

    def renew(self) -> None:
        """Tell again of reads in threads that have raised an error since :meth:`begin`."""
        if _listening:
            self._listen()

    def end(self) -> None:
        """Return to the listener before."""
        _listening.pop()
        self._listen()

    def _listen(self) -> None:
        on_unknown_read, everything, followed = (
            _listening[-1] if _listening else (None, False, False)
        )
        self._tell(on_unknown_read)
        self._copy_all(everything)
        self._follow(followed)

    def knows(self, place: MemoryRange) -> bool:
        """Return whether all values of ``place`` are known."""
        return bool(place[1] and self._knows(*place))

    def holds(self, place: MemoryRange) -> bool:
        """Return whether ``place`` lies in a segment of the device."""
        return bool(not place[1] or self._holds(*place))

    def reduction(self) -> int:
        """Return the ``ncclRedOp_t`` of the last reduction that this thread has asked NCCL for."""
        return int(self._reduction())

    def mark_known(self, place: MemoryRange) -> None:
        """Mark the present content of ``place`` as its values."""
        if place[1]:
            self._know(*place)

    def forget(self, place: MemoryRange) -> None:
        """Mark the values of ``place`` as unknown."""
        if place[1]:
            self._forget(*place)

    def range_of(self, tensor: torch.Tensor) -> MemoryRange:
        """Return the block of the allocator's that ``tensor`` lies in; no bytes if it is none."""
        if tensor.layout is not torch.strided:
            return 0, 0
        start = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.dtype.itemsize
        return start, int(self._block(start))

    def watch(self, start: int) -> int:
        """Make :meth:`dead` return the block at ``start`` once freed; return its number, or 0."""
        return int(self._watch(start))

    def dead(self) -> int | None:
        """Return the address of a watched block that has been freed; ``None`` for none."""
        found: int | None = self._dead()
        return found

    @contextmanager
    def answering(self, numbers: Sequence[int]) -> Iterator[None]:
        """Give ``numbers`` to the thread's next reads of unknown values inside, in order."""
        answers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._answer(answers, len(numbers))
        try:
            yield
        finally:
            self._answer(None, 0)


def seen_by_cpu(place: MemoryRange, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of ``place``, flat, as a CPU tensor of ``dtype``."""
    address, size = place
    count = size // dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    content = (ctypes.c_ubyte * size).from_address(address)
    return torch.frombuffer(content, dtype=dtype, count=count)
