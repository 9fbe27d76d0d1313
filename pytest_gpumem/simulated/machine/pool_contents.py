"""Values in the memory of graphs' pools, whichever tensor has that memory now.

A graph reads and writes addresses. The tensor that had one during the capture may have died since,
and another graph may use the same memory: a write of either is read by both.
"""

from __future__ import annotations

import weakref
from weakref import WeakValueDictionary

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.simulated.gpu.device import Device
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.known import Values


class Place:
    """A storage that captured work reads or writes."""

    def __init__(self, tensor: torch.Tensor, contents: PoolContents) -> None:
        storage = tensor.untyped_storage()
        self.reference = weakref.ref(storage)
        self.key: int = storage_key(tensor)
        self.nbytes = storage.nbytes()
        self.address = contents.address_of(self.key)
        """The address in a graph's pool; 0 for other memory, which dies with its storage."""

    @property
    def lives(self) -> bool:
        """Whether the storage is still there."""
        return self.reference() is not None


class PoolContents:
    """The known values in all graphs' pools of one GPU, by address."""

    def __init__(self, values: Values, memory: Memory) -> None:
        self._values = values
        self.memory = memory
        self.pools: set[PoolId] = set()
        """The pools that captures have taken memory from."""
        self._owners: dict[int, Place] = {}
        """By address: the storage that was there last, of those that captures have seen."""
        self._held: dict[int, torch.Tensor] = {}
        """By address: the bytes that were written there last, flat."""
        self._by_key: dict[int, int] = {}
        """Addresses of the storages that live."""

    def address_of(self, key: int) -> int:
        """Return the address of a storage, if it is in one of the pools; else 0."""
        record = self._values.record(key)
        if record is None or record.allocator is not self.memory or not record.address:
            return 0
        return record.address if self.memory.pool_of(record.address) in self.pools else 0

    def add(self, place: Place) -> None:
        """Register a storage that lives at its address."""
        if place.address:
            self._owners[place.address] = place
            self._by_key[place.key] = place.address
            self._values.pooled[place.key] = self

    def died(self, key: int, base: torch.Tensor | None) -> None:
        """Keep the values that a storage leaves behind, where they are known."""
        address = self._by_key.pop(key)
        if base is not None and self._owners[address].key == key:
            self._held[address] = base

    def behind(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Return all elements at ``address``; ``None`` if fewer than ``nbytes`` are known."""
        owner = self._owners.get(address)
        # The storage that lives there may have been written to outside of graphs.
        base = self._values.base(owner.key) if owner is not None and owner.lives else None
        base = self._held.get(address) if base is None else base
        return None if base is None or base.nbytes < nbytes else base

    def at(self, place: Place) -> torch.Tensor | None:
        """Return all elements at ``place``; ``None`` where they are unknown."""
        if not place.address:
            return self._values.base(place.key) if place.lives else None
        base = self.behind(place.address, place.nbytes)
        owner = self._owners[place.address]
        if base is None or (owner.lives and self._values.base(owner.key) is base):
            return base
        if base.nbytes > place.nbytes:
            # A larger storage left this: from now on there are only as many bytes.
            base = base.view(torch.uint8)[: place.nbytes].clone().view(base.dtype)
            self.put(place, base)
        elif owner.lives:
            self.put(place, base)
        return base

    def put(self, place: Place, base: torch.Tensor) -> None:
        """Set the contents at ``place`` to ``base``."""
        owner = place
        if place.address:
            self._held[place.address] = base
            owner = self._owners[place.address]
        if not owner.lives:
            return
        if base.nbytes == owner.nbytes:
            self._values.put(owner.key, base)
        else:
            self._values.forget(owner.key)

    def overwritten(self, place: Place) -> None:
        """Forget the contents of other addresses in the memory of ``place``."""
        start, end = place.address, place.address + place.nbytes
        for address, base in list(self._held.items()) if start else ():
            if address != start and address < end and address + base.nbytes > start:
                self._forget_at(address)

    def forget(self, place: Place) -> None:
        """Forget the contents at ``place``."""
        if place.address:
            self._forget_at(place.address)
        elif place.lives:
            self._values.forget(place.key)

    def _forget_at(self, address: int) -> None:
        self._held.pop(address, None)
        owner = self._owners[address]
        if owner.lives:
            self._values.forget(owner.key)


class EveryPoolContents:
    """Contents of the memory of graphs' pools, for as long as there is a graph."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._by_index: WeakValueDictionary[int, PoolContents] = WeakValueDictionary()

    def of(self, gpu: Device, pool: PoolId) -> PoolContents:
        """Return the contents of a GPU's pools, ``pool`` among them from now on."""
        found = self._by_index.get(gpu.index)
        if found is None or found.memory is not gpu.allocator:
            found = PoolContents(self._values, gpu.allocator)
            self._by_index[gpu.index] = found
        found.pools.add(pool)
        return found

    def behind(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Return all elements that a pool has at ``address``; ``None`` if they are unknown."""
        for contents in list(self._by_index.values()):
            base = contents.behind(address, nbytes)
            if base is not None:
                return base
        return None
