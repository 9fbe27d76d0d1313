"""Which storages stand for CUDA memory, and the blocks behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import Memory, SimulatedGPU


MOST_KNOWN = 4096
"""Elements of a tensor whose values are kept beside its shape."""


class SimulatedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage's block on a simulated device; dies with the storage, at that moment."""

    __slots__ = ("address", "allocator", "device", "key", "nbytes")

    key: int
    address: int
    nbytes: int
    device: SimulatedGPU
    allocator: Memory
    """Where ``address`` lies: not the device's present allocator once that has been renewed."""


class Storages:
    """The live storages of a simulation, by the address of their ``StorageImpl``."""

    def __init__(self) -> None:
        self.by_key: dict[int, SimulatedStorage] = {}
        self.on_host: dict[int, SimulatedStorage] = {}
        """Copies of CUDA tensors in host memory: CPU tensors whose values nobody knows."""
        self._known: dict[int, torch.Tensor] = {}
        """By key: the elements, on the CPU, of small storages that were copied from there."""
        self._died: Callable[[weakref.ref[torch.UntypedStorage]], None] = self._release
        self._died_on_host: Callable[[weakref.ref[torch.UntypedStorage]], None] = self._forget

    def of(self, tensor: torch.Tensor) -> SimulatedStorage | None:
        """The block behind ``tensor``; ``None`` if it does not live on a simulated device."""
        try:
            return self.by_key.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
            return None

    def know(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Remember that ``tensor``, on a device, is a copy of ``source``, a small CPU tensor."""
        if source.numel() <= MOST_KNOWN and tensor.is_contiguous() and tensor.numel():
            values = source.detach().to(tensor.dtype).flatten().clone()
            self._known[tensor.untyped_storage()._cdata] = values

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return ``tensor``'s values, as a CPU tensor of its shape, if they are known."""
        values = self._known.get(tensor.untyped_storage()._cdata) if self._known else None
        if values is None or values.dtype != tensor.dtype:
            return None
        offset = int(tensor.storage_offset())
        return values.as_strided(tensor.shape, tensor.stride(), offset).clone()

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget the values of ``tensors``: an operator may have written to them."""
        if self._known:
            for tensor in tensors:
                record = self.of(tensor)
                if record is not None:
                    self._known.pop(record.key, None)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a CPU tensor of unknown values."""
        if not self.on_host:
            return False
        try:
            return tensor.untyped_storage()._cdata in self.on_host
        except (NotImplementedError, RuntimeError):
            return False

    def adopt_on_host(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` stand for host memory with unknown values."""
        storage = tensor.untyped_storage()
        record = SimulatedStorage(storage, self._died_on_host)
        record.key = storage._cdata
        self.on_host[record.key] = record

    def adopt(self, tensor: torch.Tensor, device: SimulatedGPU) -> None:
        """Allocate a block on ``device`` for ``tensor``'s storage unless it has one."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key in self.by_key:
            return
        nbytes = storage.nbytes()
        allocator = device.allocator
        address = allocator.malloc(nbytes, device.stream) if nbytes else 0
        record = SimulatedStorage(storage, self._died)
        record.key = key
        record.allocator = allocator
        record.address = address
        record.nbytes = nbytes
        record.device = device
        self.by_key[key] = record

    def resized(self, tensor: torch.Tensor) -> None:
        """Reallocate after an operator resized ``tensor``'s storage in place."""
        record = self.of(tensor)
        if record is None:
            return
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == record.nbytes:
            return
        # resize_bytes_cuda allocates the new block before it drops the old one.
        allocator = record.device.allocator
        address = allocator.malloc(nbytes, record.device.stream) if nbytes else 0
        if record.address:
            record.allocator.free(record.address)
        record.allocator = allocator
        record.address = address
        record.nbytes = nbytes

    def at(self, addresses: Collection[int]) -> dict[int, SimulatedStorage]:
        """Return the live storages whose blocks lie at ``addresses``, by address."""
        return {
            record.address: record for record in self.by_key.values() if record.address in addresses
        }

    def _forget(self, record: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(record, SimulatedStorage)
        del self.on_host[record.key]

    def _release(self, record: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(record, SimulatedStorage)
        del self.by_key[record.key]
        self._known.pop(record.key, None)
        if record.address:
            record.allocator.free(record.address)
