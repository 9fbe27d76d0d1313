"""Values in the memory of graphs' pools, by address, whichever tensor has that memory now.

A graph reads and writes addresses. The tensor that had one during the capture may have died since,
and another graph may use the same memory: each graph reads what the other wrote.
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakValueDictionary

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.machine.generators import shared_state
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.recording import Recorder, View
from pytest_gpumem.simulated.machine.values.views import view_of


class StorageSlot:
    """A storage that captured work reads or writes."""

    def __init__(self, tensor: torch.Tensor, contents: PoolContents) -> None:
        storage = tensor.untyped_storage()
        self.reference = weakref.ref(storage)
        self.key: int = storage_key(tensor)
        self.nbytes = storage.nbytes()
        self.contents = contents
        self.address = contents.address_of(self.key)
        """The address in a graph's pool; 0 for other memory, which dies with its storage."""
        if self.address:
            contents.owners[self.address] = self
            contents.places[self.key] = self

    @property
    def lives(self) -> bool:
        """Whether the storage is still there."""
        return self.reference() is not None


class PoolContents:
    """The known values in all graphs' pools of one GPU, by address."""

    def __init__(
        self, values: Values, memory: Memory, places: WeakValueDictionary[int, StorageSlot]
    ) -> None:
        self._values = values
        self.memory = memory
        self.places = places
        """By key: the slots of storages that live in pools of any GPU."""
        self.pools: set[PoolId] = set()
        """The pools that captures have taken memory from."""
        self.owners: dict[int, StorageSlot] = {}
        """By address: the storage that was there last, of those that captures have seen."""
        self.held: dict[int, torch.Tensor] = {}
        """By address: the bytes that were written there last, flat."""

    def address_of(self, key: int) -> int:
        """Return the address of a storage, if it is in one of the pools; else 0."""
        record = self._values.storages.by_key.get(key)
        if record is None or record.allocator is not self.memory or not record.address:
            return 0
        return record.address if self.memory.pool_of(record.address) in self.pools else 0

    def elements_at(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Return all elements at ``address``; ``None`` if fewer than ``nbytes`` are known."""
        owner = self.owners.get(address)
        # The storage that lives there may have been written to outside of graphs.
        base = self._values.base(owner.key) if owner is not None and owner.lives else None
        base = self.held.get(address) if base is None else base
        return None if base is None or base.nbytes < nbytes else base

    def at(self, place: StorageSlot) -> torch.Tensor | None:
        """Return all elements at ``place``; ``None`` where they are unknown."""
        if not place.address:
            return self._values.base(place.key) if place.lives else None
        base = self.elements_at(place.address, place.nbytes)
        owner = self.owners[place.address]
        if base is None or (owner.lives and self._values.base(owner.key) is base):
            return base
        if base.nbytes > place.nbytes:
            # A larger storage was here before: only this one's bytes remain, of any type.
            base = base.view(torch.uint8)[: place.nbytes].clone()
            self.put(place, base)
        elif owner.lives:
            self.put(place, base)
        return base

    def put(self, place: StorageSlot, base: torch.Tensor) -> None:
        """Set the contents at ``place`` to ``base``."""
        owner = place
        if place.address:
            self.held[place.address] = base
            owner = self.owners[place.address]
        if not owner.lives:
            return
        if base.nbytes == owner.nbytes:
            self._values.put(owner.key, base)
        else:
            self._values.forget(owner.key)

    def overwritten(self, place: StorageSlot) -> None:
        """Forget the contents at other addresses that overlap ``place``, which was written."""
        start, end = place.address, place.address + place.nbytes
        for address, base in list(self.held.items()) if start else ():
            if address != start and address < end and address + base.nbytes > start:
                self._forget_at(address)

    def forget(self, place: StorageSlot) -> None:
        """Forget the contents at ``place``."""
        if place.address:
            self._forget_at(place.address)
        elif place.lives:
            self._values.forget(place.key)

    def _forget_at(self, address: int) -> None:
        self.held.pop(address, None)
        owner = self.owners[address]
        if owner.lives:
            self._values.forget(owner.key)


class EveryPoolContents:
    """Contents of the memory of graphs' pools, for as long as there is a graph."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._by_index: WeakValueDictionary[int, PoolContents] = WeakValueDictionary()
        self._places: WeakValueDictionary[int, StorageSlot] = WeakValueDictionary()

    def of(self, gpu: GpuState, pool: PoolId) -> PoolContents:
        """Return the contents of a GPU's pools, and add ``pool`` to these."""
        found = self._by_index.get(gpu.index)
        if found is None or found.memory is not gpu.allocator:
            found = PoolContents(self._values, gpu.allocator, self._places)
            self._by_index[gpu.index] = found
        found.pools.add(pool)
        return found

    def died(self, key: int) -> None:
        """Drop the values of a storage that has died, but for what it leaves in a pool."""
        place = self._places.pop(key, None) if self._places else None
        if place is not None:
            base = self._values.base(key)
            if base is not None and place.contents.owners[place.address] is place:
                place.contents.held[place.address] = base
        self._values.forget(key)

    def elements_at(self, address: int, nbytes: int) -> torch.Tensor | None:
        """Return all elements that a pool has at ``address``; ``None`` if they are unknown."""
        for contents in list(self._by_index.values()):
            base = contents.elements_at(address, nbytes)
            if base is not None:
                return base
        return None


class GraphRecording(Recorder[StorageSlot]):
    """The operators of one capture."""

    def __init__(self, values: Values, contents: PoolContents) -> None:
        super().__init__()
        self._values = values
        self._contents = contents
        self._places: dict[int, StorageSlot] = {}
        self._uninitialized: set[StorageSlot] = set()
        """Memory made for a write: its earlier contents do not matter."""

    def _place_of(self, tensor: torch.Tensor) -> StorageSlot:
        key = storage_key(tensor)
        place = self._places.get(key)
        if place is None or not place.lives:
            place = self._places[key] = StorageSlot(tensor, self._contents)
        return place

    def _generator_of(self, kwargs: Kwargs) -> torch.Generator | None:
        given = kwargs.get("generator")
        return None if given is None else shared_state(given)

    def _seen(self, view: View[StorageSlot], *, is_read: bool) -> torch.Tensor | None:
        place = view.place
        base = self._contents.at(place)
        if base is None:
            if is_read and place not in self._uninitialized:
                return None
            dtype = view.layout.dtype
            base = torch.empty(place.nbytes // dtype.itemsize, dtype=dtype, device=CPU)
            self._contents.put(place, base)
        return view_of(base, view.layout)

    def _run(
        self, operator: Operator, args: Args, kwargs: Kwargs, generator: torch.Generator | None
    ) -> Any:
        if generator is not None:
            kwargs = {**kwargs, "generator": generator}
        return self._values.run(operator, args, kwargs)

    def _mark_uninitialized(self, view: View[StorageSlot]) -> None:
        self._uninitialized.add(view.place)

    def _mark_known(self, view: View[StorageSlot]) -> None:
        self._contents.overwritten(view.place)

    def _forget(self, view: View[StorageSlot]) -> None:
        self._uninitialized.discard(view.place)
        self._contents.forget(view.place)
