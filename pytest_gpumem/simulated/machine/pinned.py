"""Page-locked host memory: pageable here, but remembered as pinned."""

from __future__ import annotations

import weakref

import torch

_data_ptr = torch.UntypedStorage.data_ptr

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""
_INVALID = 1
"""cudaErrorInvalidValue."""


class Pinned:
    """The storages that count as pinned, by the address of their ``StorageImpl``."""

    def __init__(self) -> None:
        self._by_key: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._registered: dict[int, int] = {}
        """Address and size of memory registered by ``cudaHostRegister``."""

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember ``tensor``'s storage as pinned."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._by_key:
            return tensor

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._by_key[key]

        self._by_key[key] = weakref.ref(storage, died)
        return tensor

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned CPU copy with the same strides (``_pin_memory``, native/Memory.cpp)."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return self.add(made).copy_(tensor)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` is pinned."""
        if self._by_key and storage._cdata in self._by_key:
            return True
        address = _data_ptr(storage) if self._registered else 0
        return any(begin <= address < begin + size for begin, size in self._registered.items())

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
