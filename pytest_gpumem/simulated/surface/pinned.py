"""Page-locked host memory: pageable here, but remembered as pinned."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.allocator.host_memory import HostAllocator

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


class Pinned:
    """The storages that count as pinned, by the address of their ``StorageImpl``."""

    def __init__(self) -> None:
        self._by_key: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.memory = HostAllocator()
        """What CUDA's allocator of pinned memory would hold."""

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember ``tensor``'s storage as pinned."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        by_key, memory = self._by_key, self.memory
        if key in by_key:
            return tensor
        block = memory.allocate(storage.nbytes())

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            del by_key[key]
            memory.free(block)

        by_key[key] = weakref.ref(storage, died)
        return tensor

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is pinned."""
        return bool(self._by_key) and storage._cdata in self._by_key

    def plan(self, simulation: Simulation, patches: Patches) -> None:
        """Replace ``pin_memory`` and ``is_pinned``."""

        def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
            try:
                return self.has(tensor.untyped_storage())
            except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
                return False

        def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
            if simulation.storages.of(tensor) is not None:
                raise RuntimeError(
                    f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned"
                )
            return tensor if is_pinned(tensor) else self.add(tensor.clone())

        patches.plan(torch.Tensor, "is_pinned", is_pinned)
        patches.plan(torch.Tensor, "pin_memory", pin_memory)
        patches.plan(
            torch.UntypedStorage, "is_pinned", lambda storage, device=None: self.has(storage)
        )
