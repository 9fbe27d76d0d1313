"""Page-locked host memory: pageable here, but remembered as pinned.

``pin_memory()`` hands out memory of blocks that are used again, as torch's allocator of pinned
memory does; tensors that a factory makes with ``pin_memory=True`` use the CPU allocator's memory.
torch's statistics of such memory are not kept.
"""

from __future__ import annotations

import weakref

import torch

from pytest_gpumem.allocator.trace import StreamKey
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.streams import Streams
from pytest_gpumem.simulated.machine.values.views import layout_of

_data_ptr = torch.UntypedStorage.data_ptr

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""
_INVALID = 1
"""cudaErrorInvalidValue."""
_ALIGNMENT = 64
"""The alignment of the CPU's allocator; page-locked memory would begin with a page."""
MOST_CACHED = 64 << 20
"""Bytes of real memory that wait for their next use; torch keeps all, which here costs the host."""


class Block:
    """The memory of a pinned storage, and when the copies from it are over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer: bytearray | None = None
        self.streams: set[StreamKey] = set()
        """The streams that copy from it or to it (``record_event``)."""
        self.free_from = 0.0

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of the block."""
        if self.buffer is None:
            self.buffer = bytearray(self.size + _ALIGNMENT)
        whole = torch.frombuffer(self.buffer, dtype=torch.uint8)
        offset = -whole.data_ptr() % _ALIGNMENT
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=nbytes, offset=offset)


class Pinned:
    """The storages that count as pinned, by the address of their ``StorageImpl``.

    A block is a power of two, is never split, and is kept for the next request of its size.
    Source: aten/src/ATen/core/CachingHostAllocator.h.
    """

    def __init__(self, streams: Streams) -> None:
        self._by_key: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._blocks: dict[int, Block] = {}
        self._busy: list[Block] = []
        """Blocks that were given back while a stream copied from them."""
        self._cached: list[Block] = []
        self._registered: dict[int, int] = {}
        """Address and size of memory registered by ``cudaHostRegister``."""
        self._streams = streams

    def add(self, tensor: torch.Tensor, block: Block | None = None) -> torch.Tensor:
        """Remember ``tensor``'s storage as pinned."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._by_key:
            return tensor
        self._process_events()
        self._blocks[key] = block or Block(storage.nbytes())

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._by_key[key]
            block = self._blocks.pop(key)
            ends = [self._streams.clock.end(each) for each in block.streams]
            block.streams.clear()
            if ends:
                block.free_from = max(ends)
                self._busy.append(block)
            else:
                self._reuse(block)

        self._by_key[key] = weakref.ref(storage, died)
        return tensor

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned CPU copy with the same strides (``_pin_memory``, native/Memory.cpp)."""
        if not tensor.numel():
            return self.add(tensor.clone())
        nbytes = layout_of(tensor)._replace(offset=0).end
        self._process_events()
        size = 1 << (nbytes - 1).bit_length()
        block = next((each for each in reversed(self._cached) if each.size == size), None)
        if block is None:
            block = Block(size)
        else:
            self._cached.remove(block)
        memory = block.tensor(nbytes).untyped_storage()
        pinned = torch.empty(0, dtype=tensor.dtype)
        pinned.set_(memory, 0, tensor.shape, tensor.stride())
        self.add(pinned, block)
        return pinned.copy_(tensor)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` is pinned."""
        if self._by_key and storage._cdata in self._by_key:
            return True
        address = _data_ptr(storage) if self._registered else 0
        return any(begin <= address < begin + size for begin, size in self._registered.items())

    def used_by(self, tensor: torch.Tensor, device: int) -> None:
        """Note that a GPU's current stream copies from or to ``tensor`` without blocking."""
        block = self._blocks.get(storage_key(tensor)) if self._blocks else None
        if block is not None:
            block.streams.add((device, self._streams.current(device)))

    def register(self, address: int, size: int) -> int:
        """``cudaHostRegister``; its result code."""
        if size <= 0 or not address:
            return _INVALID
        if any(
            begin < address + size and address < begin + length
            for begin, length in self._registered.items()
        ):
            return ALREADY_REGISTERED
        self._registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``; its result code."""
        return NOT_REGISTERED if self._registered.pop(address, None) is None else 0

    def empty_cache(self) -> None:
        """``_host_emptyCache``."""
        self._process_events()
        self._cached.clear()

    def _process_events(self) -> None:
        """``process_events``: blocks whose copies are over can be used again."""
        clock = self._streams.clock
        while self._busy and clock.is_over(self._busy[0].free_from):
            self._reuse(self._busy.pop(0))

    def _reuse(self, block: Block) -> None:
        held = block.size + sum(each.size for each in self._cached)
        if block.buffer is not None and held <= MOST_CACHED:
            self._cached.append(block)
