"""The device's memory as CPU tensors, and the runtime's record of known values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.dry.load import function

MemoryRange = tuple[int, int]
"""Address and bytes of a block on the device."""

_OnUnknownRead = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)

_listening: list[tuple[Any, bool, bool]] = []
"""Callback for reads, whether copies of any size count as known, and whether operators are
followed; the last entry is active."""


class Memory:
    """The functions of ``source/values.c``."""

    def __init__(self, on_unknown_read: Callable[[int], type[BaseException] | None]) -> None:
        """Call ``on_unknown_read`` with the bytes of each read of unknown values.

        The error class that it returns is raised when the thread returns to Python. The caller has
        to keep a reference to the class.
        """
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

        def callback(size: int) -> int | None:
            kind = on_unknown_read(size)
            return None if kind is None else id(kind)

        self._callback = _OnUnknownRead(callback)

    def begin(self, *, everything: bool, followed: bool) -> None:
        """Report reads from now on; with ``everything``, values of copies of any size are known."""
        _listening.append((self._callback, everything, followed))
        self._listen()

    def renew(self) -> None:
        """Report reads again in threads that have raised an error since :meth:`begin`."""
        if _listening:
            self._listen()

    def end(self) -> None:
        """Restore the callback from before :meth:`begin`."""
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
        """Return the ``ncclRedOp_t`` of the last reduction that this thread passed to NCCL."""
        return int(self._reduction())

    def mark_known(self, place: MemoryRange) -> None:
        """Mark the current content of ``place`` as known values."""
        if place[1]:
            self._know(*place)

    def forget(self, place: MemoryRange) -> None:
        """Mark the values of ``place`` as unknown."""
        if place[1]:
            self._forget(*place)

    def range_of(self, tensor: torch.Tensor) -> MemoryRange:
        """Return the allocator's block that contains ``tensor``; with 0 bytes if there is none."""
        if tensor.layout is not torch.strided:
            return 0, 0
        start = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.dtype.itemsize
        return start, int(self._block(start))

    def watch(self, start: int) -> int:
        """Have :meth:`dead` report the free of the block at ``start``; return its number, or 0."""
        return int(self._watch(start))

    def dead(self) -> int | None:
        """Return the address of a watched block that has been freed; ``None`` for none."""
        found: int | None = self._dead()
        return found

    @contextmanager
    def answering(self, numbers: Sequence[int]) -> Iterator[None]:
        """Return ``numbers``, in order, from the thread's next reads of unknown values inside."""
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
