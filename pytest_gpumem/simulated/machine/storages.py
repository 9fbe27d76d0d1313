"""Storages that stand for CUDA memory, with their blocks; pinned memory of the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import provenance
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.gpu.memory import Memory

ELSEWHERE = 1 << 48
"""Offset of addresses of memory of earlier tests; CUDA's have 47 bits."""

MOST_POISONED = 65_536
"""Most elements that are filled in a CPU tensor of unknown values."""

_data_ptr = raw.base("data_ptr")
_storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]  # missing in the stub


_Reference = weakref.ref[torch.UntypedStorage]


class SimulatedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage's block on a simulated device, freed at the moment when the storage dies."""

    __slots__ = ("address", "allocator", "device", "key", "nbytes")

    @property
    def pointer(self) -> int:
        """The address that code under test sees, unlike that of any other live storage.

        Every test's memory begins at the same addresses, so blocks of earlier tests are moved up.
        """
        if self.allocator is self.device.allocator or self.allocator is BORROWED:
            return self.address
        return self.address + ELSEWHERE

    key: int
    address: int
    nbytes: int
    device: GpuState
    allocator: Memory
    """The allocator of ``address``: the device has another one once it has been renewed."""


class _BorrowedMemory:
    """The allocator of memory that a storage only points to."""

    def free(self, address: int, context: Any = None) -> None:
        """Do nothing: the owner of the memory frees it."""

    def record_stream(self, address: int, stream: int, device: int | None = None) -> None:
        """Do nothing, as torch with memory that its allocator does not own."""

    def block(self, address: int) -> int:
        """Return 0 bytes: they are counted by their owner."""
        return 0


BORROWED: Any = _BorrowedMemory()


class Storages:
    """The live storages of a simulation, by the address of their ``StorageImpl``."""

    def __init__(self) -> None:
        self.by_key: dict[int, SimulatedStorage] = {}
        self.unknown_on_cpu: dict[int, SimulatedStorage] = {}
        """CPU tensors of unknown values: copies of CUDA tensors, and results computed from them.

        ``nbytes`` is the memory that was requested and is not used.
        """
        self.host_scalars: dict[int, SimulatedStorage] = {}
        """Tensors that CUDA keeps on the host although torch reports ``meta``: seeds of dropout,
        numbers that C++ made tensors of. They may be used with tensors of any device."""
        self.users_own: dict[int, SimulatedStorage] = {}
        """Tensors that user code requested on ``meta``."""
        self.without_values: dict[int, torch.Tensor] = {}
        """By key of a storage ``unknown_on_cpu``: memory marked as unknown, for readers in C."""
        self.reused: dict[int, str] = {}
        """By key: the error for readers of a storage whose memory a graph uses again."""
        self.lock: RLock | None = None
        """The lock held while a storage's block is freed, once several threads run operators."""
        self.died: Callable[[int], None] = _ignore
        """Called with the key of each storage that dies, before another can take its address."""
        self.regrown: Callable[[torch.Tensor], None] = _ignore
        """Called with each tensor whose storage an operator may have resized."""
        self._died: Callable[[_Reference], None] = self._release
        self._died_on_host: Callable[[_Reference], None] = self._forget

    def of(self, tensor: torch.Tensor) -> SimulatedStorage | None:
        """Return the block of ``tensor``; ``None`` if it is on no simulated device."""
        try:
            return self.by_key.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            parts = parts_of_sparse(tensor)
            if not parts and is_functorch_wrapped_tensor(tensor):
                parts = [get_unwrapped(tensor)]  # of vmap, grad and their relatives
            return self.of(parts[-1]) if parts else None
        except ValueError:
            return self.by_key.get(storage_key(tensor))

    def is_unknown_on_cpu(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a CPU tensor of unknown values."""
        return bool(self.unknown_on_cpu) and storage_key(tensor) in self.unknown_on_cpu

    def mark_unknown(self, tensor: torch.Tensor) -> SimulatedStorage:
        """Mark the values of ``tensor``, a CPU tensor, as unknown."""
        return self._remember(tensor, self.unknown_on_cpu)

    def mark_host_scalars(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark those of ``tensors`` that have no block as scalars of the host."""
        for tensor in tensors:
            if self.of(tensor) is None:
                self._remember(tensor, self.host_scalars)

    def is_seed(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a seed or an offset, which attention leaves on the host."""
        known = bool(self.host_scalars) and storage_key(tensor) in self.host_scalars
        return known and not tensor.dim() and tensor.dtype in (torch.int64, torch.uint64)

    def mark_users_own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark those of ``tensors`` that are on ``meta`` as requested there by user code."""
        for tensor in tensors:
            if raw.is_meta(tensor) and storage_key(tensor):
                self._remember(tensor, self.users_own)

    def _remember(
        self, tensor: torch.Tensor, among: dict[int, SimulatedStorage]
    ) -> SimulatedStorage:
        storage = tensor.untyped_storage()
        record = SimulatedStorage(storage, self._died_on_host)
        record.key = storage._cdata
        record.nbytes = 0
        among[record.key] = record
        return record

    def new_unknown_on_cpu(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a CPU tensor of unknown values.

        It holds NaN or impossible numbers, in case a reader cannot be refused, in C++ or after the
        simulation; a large one only at its beginning, so that other pages cost no memory.
        """
        made = raw.empty_strided(size, stride, dtype=dtype, device="cpu")
        large = made.numel() > MOST_POISONED
        poison(raw.as_strided(made, (MOST_POISONED,), (1,)) if large else made)
        if large:
            torch._C._set_throw_on_mutable_data_ptr(made)
        record = self.mark_unknown(made)
        record.nbytes = made.untyped_storage().nbytes() if large else 0
        return made

    def address_without_values(self, storage: torch.UntypedStorage) -> int:
        """Return the address of memory as long as ``storage`` with a NaN pattern in every dtype."""
        made = self.without_values.get(storage._cdata)
        if made is None:
            with torch._C._DisableTorchDispatch():
                made = torch.full((storage.nbytes(),), _NAN_BYTE, dtype=torch.uint8, device="cpu")
            self.without_values[storage._cdata] = made
        return int(_data_ptr(made))

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a CPU tensor whose memory was allocated and never used."""
        record = self.unknown_on_cpu.get(storage_key(tensor)) if self.unknown_on_cpu else None
        return record is not None and record.nbytes > 0

    def mark_known(self, tensor: torch.Tensor) -> None:
        """Mark the values of ``tensor``, a CPU tensor, as known again."""
        key = tensor.untyped_storage()._cdata
        self.unknown_on_cpu.pop(key, None)
        self.without_values.pop(key, None)

    def track(self, tensor: torch.Tensor, device: GpuState) -> None:
        """Allocate a block on ``device`` for ``tensor``'s storage unless it has one."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            for part in parts_of_sparse(tensor):
                self.track(part, device)
            return
        if storage._cdata in self.by_key:
            return
        nbytes, allocator, address = storage.nbytes(), device.allocator, 0
        if nbytes:
            holding = provenance()
            holding.shape, holding.dtype = tensor.shape, tensor.dtype
            address = allocator.malloc(nbytes, device.stream, holding)
        self.refer(storage, address, device, allocator)

    def refer(
        self,
        storage: torch.UntypedStorage,
        address: int,
        device: GpuState,
        owner: Memory = BORROWED,
    ) -> SimulatedStorage:
        """Make ``storage`` refer to memory at ``address``, which ``owner`` frees when it dies."""
        record = SimulatedStorage(storage, self._died)
        record.key = storage._cdata
        record.allocator = owner
        record.address = address
        record.nbytes = storage.nbytes()
        record.device = device
        self.by_key[record.key] = record
        return record

    def resized(self, tensor: torch.Tensor) -> None:
        """Reallocate after an operator resized ``tensor``'s storage in place."""
        record = self.of(tensor)
        if record is None:
            return
        self.regrown(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes != record.nbytes:
            self.reallocate(record, nbytes)

    def reallocate(self, record: SimulatedStorage, nbytes: int) -> None:
        """Give a storage a new block of ``nbytes`` bytes."""
        # resize_bytes_cuda allocates the new block before it drops the old one.
        allocator = record.device.allocator
        address = allocator.malloc(nbytes, record.device.stream) if nbytes else 0
        if record.address:
            record.allocator.free(record.address)
        record.allocator = allocator
        record.address = address
        record.nbytes = nbytes

    def refuse_reused(self, key: int) -> None:
        """Raise torch's error for a read of storage ``key`` if a graph uses its memory again."""
        words = self.reused.get(key)
        if words is not None:
            raise RuntimeError(words)

    def _forget(self, record: _Reference) -> None:
        assert isinstance(record, SimulatedStorage)
        for among in (self.unknown_on_cpu, self.host_scalars, self.users_own):
            if among.get(record.key) is record:
                del among[record.key]
                self.without_values.pop(record.key, None)

    def _release(self, record: _Reference) -> None:
        assert isinstance(record, SimulatedStorage)
        del self.by_key[record.key]
        self.reused.pop(record.key, None)
        self.died(record.key)
        if not record.address:
            return
        if self.lock is None:  # nearly always
            record.allocator.free(record.address)
        else:
            with self.lock:
                record.allocator.free(record.address)


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of ``tensor``; 0 if it has no storage of its own.

    This is ``_cdata`` of the storage, without a Python object for it: that would be one more owner,
    and autograd accumulates in place where there is only one.
    """
    try:
        return _storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
        return 0


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors of a sparse one, values last; none for other tensors."""
    layout = tensor.layout
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        names = _COMPRESSED.get(layout, ())
        return [getattr(tensor, name)() for name in (*names, "values")] if names else []


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor``, a CPU tensor, with NaN, the least integer, or bytes of NaN."""
    dtype = tensor.dtype
    if dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(_NAN_BYTE)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(math.nan)
    else:
        tensor.fill_(torch.iinfo(dtype).min)


_NAN_BYTE = 0xFF
"""A byte that is NaN in 8-bit formats of floats, and -1 or 255 among integers."""


def _ignore(_: Any) -> None: ...


_pointer = torch.UntypedStorage.data_ptr

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""
_INVALID = 1
"""cudaErrorInvalidValue."""


class Pinned:
    """Storages of the host that count as page-locked."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._registered: dict[int, int] = {}
        """Address and size of memory registered by ``cudaHostRegister``."""

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember ``tensor``'s storage as pinned."""
        self._storages.add(tensor.untyped_storage())
        return tensor

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned CPU copy with the same strides (``_pin_memory``, native/Memory.cpp)."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return self.add(made).copy_(tensor)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` is pinned."""
        if storage in self._storages:
            return True
        address = _pointer(storage) if self._registered else 0
        return any(begin <= address < begin + size for begin, size in self._registered.items())

    def is_sent(self, host: torch.Tensor, other: torch.Tensor, *, non_blocking: bool) -> bool:
        """Return whether a copy needs no other memory of the host (copy_requires_temporaries)."""
        is_converted = host.dtype != other.dtype and not non_blocking
        is_moved = not host.is_contiguous() and host.stride() != other.stride()
        return self.has(host.untyped_storage()) and not is_converted and not is_moved

    def register(self, address: int, size: int) -> int:
        """Return the result code of ``cudaHostRegister``."""
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
        """Return the result code of ``cudaHostUnregister``."""
        return NOT_REGISTERED if self._registered.pop(address, None) is None else 0
