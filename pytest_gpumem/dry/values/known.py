"""Known values of the dry device, kept in the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pytest_gpumem.dry.values.dispatch import not_followed
from pytest_gpumem.dry.values.memory import Memory, MemoryRange, seen_by_cpu
from pytest_gpumem.dry.values.random_numbers import RandomNumbers
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, is_out
from pytest_gpumem.simulated.machine.storages import Storages, parts_of_sparse, storage_key
from pytest_gpumem.simulated.machine.values.facts import Fact
from pytest_gpumem.simulated.machine.values.finite import Infinity
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import is_dense, layout_of, on_device
from pytest_gpumem.sizes import MIB


class DryValues(Values):
    """The results of operators, and read facts, written to memory that torch's own code reads."""

    why_unknown = (
        "which a dry GPU does not have: no copy has brought it, and kernels compute nothing"
    )

    def __init__(
        self, memory: Memory, storages: Storages, notes: Notes, *, everything: bool
    ) -> None:
        super().__init__(storages, notes, everything=everything)
        self._memory = memory
        self._places: dict[int, MemoryRange] = {}
        """Memory ranges of values known to the runtime, by storage key."""
        self._watched: dict[int, tuple[int, int]] = {}
        """Key of a block's storage and the block's number, by address."""
        self._passing: dict[int, int] = {}
        """Addresses of storages whose end may not be reported, by key; kept for one operator.

        No followed operator has made them, so another storage may own their memory, as with
        ``from_blob`` and DLPack."""
        self.random = RandomNumbers()
        """The random numbers of operators."""

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the values of ``tensors`` written by copies, not by followed operators."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self.track(parts_of_sparse(tensor))
                continue
            if tensor.is_nested or tensor.is_quantized:
                continue
            key = storage_key(tensor)
            if key in self._bases:
                continue
            start, size = self._memory.range_of(tensor)
            if self._watched.get(start, (None, 0))[0] != key:
                self._passing[key] = start
            if not size:
                # It has elements but no block: it was made from an address in a graph's pool.
                size = layout_of(tensor).end if tensor.numel() else 0
                if not size or self._memory.knows((start, size)):
                    self._bases[key] = seen_by_cpu((start, size), tensor.dtype)
                continue
            # No tensor contains the end of the block, so no copy writes to it.
            end = layout_of(tensor).end
            all_but_end = max(end, size - 511)
            if self._memory.knows((start, end if _is_nearly(end, size) else all_but_end)):
                self._hold_at(tensor, (start, size))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the values of ``tensor`` are known."""
        with not_followed():  # a followed operator would call end()
            self.track([tensor])
            found = self.of(tensor) is not None
            self.end()
        return found

    def has_result(self, tensor: torch.Tensor) -> bool:
        """Return whether a followed operator has computed the values of ``tensor``."""
        return storage_key(tensor) in self._bases

    def end(self) -> None:
        """Forget dead storages, and those whose end may not be reported."""
        self.forget_dead()
        while self._passing:
            key, start = self._passing.popitem()
            owner, _ = self._watched.get(start, (0, 0))
            if key in self._bases:
                self._uninitialized.discard(owner)
            elif owner in self._bases:
                self.forget(owner)
            self._places.pop(key, None)  # the runtime still knows the values
            super().forget(key)

    def forget_dead(self) -> None:
        """Forget storages that have died since the last call."""
        while (start := self._memory.dead()) is not None:
            self._died(start)

    def resume(self) -> None:
        """Forget storages that died while another instance received the reports."""
        for start, (_, number) in list(self._watched.items()):
            if self._memory.watch(start) != number:
                self._died(start)

    def _died(self, start: int) -> None:
        key, _ = self._watched.pop(start, (None, 0))
        if key is not None:
            self._places.pop(key, None)  # another block may be there now
            self.forget(key)

    def moving(self, starts: Iterable[int]) -> Callable[[Mapping[int, torch.Tensor]], None]:
        """Keep the values of blocks at ``starts``, which will move.

        Returns a function to be called with the moved tensors by their old addresses.
        """
        watched = {start for start in starts if self._watched.pop(start, None) is not None}

        def moved(tensors: Mapping[int, torch.Tensor]) -> None:
            self.forget_dead()
            for start in watched:
                tensor = tensors[start]
                key, place = storage_key(tensor), self._memory.range_of(tensor)
                if key in self._bases:
                    self._hold_at(tensor, place, self._bases[key].dtype)
                elif key in self._places:
                    self._places[key] = place
                self._watch(tensor)

        return moved

    def track_whole(self, tensor: torch.Tensor, infinite: Infinity, *, made: bool) -> bool:
        """Record the values of ``tensor``, the target of a copy; return whether all are known.

        ``made``: the copy has made the tensor, with a new storage.
        """
        if made:
            self.forget_dead()
            self._watch(tensor)
        key = storage_key(tensor)
        if key in self._bases:
            return False
        self.track([tensor])
        self._stated.pop(key, None)
        if infinite:
            self._set_fact(tensor, Fact(infinite=infinite))
        return key in self._bases

    def mark_unknown(self, tensor: torch.Tensor) -> None:
        """Forget the values of ``tensor`` and of its storage."""
        self.forget(storage_key(tensor))
        if tensor.layout is torch.strided and raw.is_on_device(tensor):
            self._memory.forget(self._memory.range_of(tensor))

    def write_facts(self, tensor: torch.Tensor) -> None:
        """Write known facts on all elements of ``tensor`` to its memory, so that reads see them."""
        key = storage_key(tensor)
        uniform = self.facts.uniform(tensor) if key and key not in self._bases else None
        if uniform is not None:
            place = self._memory.range_of(tensor)
            seen_by_cpu(place, tensor.dtype).fill_(uniform)
            self._memory.mark_known(place)
            self._places[key] = place

    def forget_copied(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Forget values that copies have written to the new or overwritten tensors of ``result``.

        An operator that copies an argument to its result usually has a kernel change the copy.
        Computed values stay.
        """
        made = [each for each in on_device(result) if storage_key(each) not in self._bases]
        given = self._uninitialized
        if made:
            given = given.union(map(storage_key, on_device((args, kwargs))))
        if made and is_out(operator.func._schema):
            given = given.difference(map(storage_key, operator.targets(args, kwargs)))
        for tensor in made:
            if storage_key(tensor) not in given:
                self._memory.forget(self._memory.range_of(tensor))

    def forget(self, key: int) -> None:
        """Drop the values of a storage that has died or whose values are no longer known."""
        place = self._places.pop(key, None)
        if place is not None:
            self._memory.forget(place)
        super().forget(key)

    def holds_at(self, start: int) -> bool:
        """Return whether the values of the storage at ``start`` are known."""
        key, _ = self._watched.get(start, (None, 0))
        return key in self._bases

    def replayed(self, start: int, *, known: bool) -> None:
        """Record that a replay has written ``known`` or unknown values at ``start``, a storage."""
        key, _ = self._watched.get(start, (None, 0))
        if key is None:
            return
        if known:
            self._stated.pop(key, None)
        else:
            self.forget(key)

    def source_of(self, generator: torch.Generator) -> torch.Generator:
        """Return the CPU generator that draws the numbers of the CUDA ``generator``."""
        return self.random.source_of(generator)

    def _make(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        super()._make(operator, args, kwargs, result)
        if storage_key(result) in self._uninitialized:
            # Copies in other threads, such as gloo's, may write to it.
            self._memory.forget(self._memory.range_of(result))

    def _write(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        for target in operator.targets(args, kwargs):
            base = self._bases.get(storage_key(target))
            if base is not None and not base.numel() and target.numel():
                self.forget(storage_key(target))  # it had no memory before the operator
        super()._write(operator, args, kwargs, result)

    def _put(self, tensor: torch.Tensor, base: torch.Tensor) -> None:
        place = self._memory.range_of(tensor)
        seen_by_cpu(place, tensor.dtype)[: base.numel()].copy_(base)
        self._hold_at(tensor, place)

    def _put_blank(self, tensor: torch.Tensor) -> None:
        self._hold_at(tensor, self._memory.range_of(tensor))

    def _hold_at(
        self, tensor: torch.Tensor, place: MemoryRange, dtype: torch.dtype | None = None
    ) -> None:
        """Use the memory at ``place`` as the values of the storage of ``tensor``."""
        if not place[1]:
            return  # without elements, which :meth:`track` handles
        key = storage_key(tensor)
        self.put(key, seen_by_cpu(place, dtype or tensor.dtype))
        self._places[key] = place
        self._memory.mark_known(place)
        self._watch_at(place, key)

    def _keeps(self, tensor: torch.Tensor) -> bool:
        has_block = not tensor.numel() or self._memory.range_of(tensor)[1] > 0
        return has_block and super()._keeps(tensor)

    def _elements(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
        return self._memory.range_of(tensor)[1] // (dtype or tensor.dtype).itemsize

    def _covers(self, tensor: torch.Tensor) -> bool:
        size = self._memory.range_of(tensor)[1]
        return is_dense(tensor) and _is_nearly(tensor.numel() * tensor.dtype.itemsize, size)

    def _watch(self, tensor: torch.Tensor) -> None:
        # Without a Python object of the storage, which would be another owner (``storage_key``).
        self._watch_at(self._memory.range_of(tensor), storage_key(tensor))

    def _watch_at(self, place: MemoryRange, key: int) -> None:
        start, size = place
        if size and start not in self._watched and key not in self._passing:
            self._watched[start] = key, self._memory.watch(start)


def _is_nearly(size: int, block: int) -> bool:
    """Return whether the allocator may have rounded ``size`` bytes up to ``block`` bytes.

    It adds up to 512 B, and up to 1 MiB if it does not split a larger block
    (``should_split`` of c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15).
    """
    left = block - size
    return left < 512 or (size > MIB and left <= MIB)
