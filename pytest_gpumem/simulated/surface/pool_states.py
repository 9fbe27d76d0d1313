"""Checkpoints of private pools, and storages that point to memory of others.

Source: torch/csrc/cuda/Module.cpp (_cuda_setCheckpointPoolState, removeStorageDeleterFns,
addStorageDeleterFns, _construct_storage_from_data_pointer,
_has_Standard_Deleter, _free_And_Remove_DeleterFn, _set_storage_access_error_msg,
_tensors_data_ptrs_at_indices_equal), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_gpumem.allocator import AllocatorError
from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.allocator.checkpoints import PoolState
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import BORROWED, storage_key


class _Surface:
    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def get(self, device: int, pool: PoolId) -> PoolState:
        try:
            return self._machine.device(device).allocator.pool_state((pool[0], pool[1]))
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None

    def set(
        self,
        device: int,
        state: PoolState,
        stale_storages: Sequence[int],
        storages_to_own: Sequence[int] = (),
    ) -> None:
        """Set a pool's state; both lists hold the addresses of storages (``_cdata``)."""
        memory = self._machine.device(device).allocator
        try:
            freed, live = memory.set_pool_state(state)
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None
        if len(set(stale_storages)) < len(freed - live):
            raise RuntimeError(
                "Any stale tensors which are being manually freed must be passed to set checkpoint"
            )
        records = self._machine.storages.by_key
        for key in stale_storages:
            if key in records and records[key].address in freed:
                records[key].allocator = BORROWED
        for key in storages_to_own:
            if key in records and records[key].address in live:
                records[key].allocator = memory

    def storage(self, pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
        """Return a storage at ``pointer``, which frees nothing."""
        storage = torch.UntypedStorage(nbytes, device="meta")
        gpu = self._machine.device(torch.device(device).index)
        record = self._machine.storages.refer(storage, pointer, gpu)
        left = self._machine.pool_contents.behind(pointer, nbytes)
        if left is not None:
            self._machine.values.put(record.key, left)
        return storage

    def tensor(self, metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor on ``storage``."""
        made = torch.empty(0, dtype=metadata["dtype"], device="cuda")
        return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    def has_own_memory(self, key: int) -> bool:
        """Return whether the storage at ``key`` frees its memory."""
        record = self._machine.storages.by_key.get(key)
        return record is not None and record.allocator is not BORROWED

    def release(self, key: int) -> None:
        """Free the memory of the storage at ``key`` now, and not when it dies."""
        record = self._machine.storages.by_key[key]
        record.allocator.free(record.address)
        record.allocator = BORROWED

    def take_back(self, tensor: torch.Tensor, words: str) -> None:
        """Raise an error with ``words`` at each read of ``tensor`` from now on.

        torch takes its storage from the tensor; here tensors that share the storage raise, too.
        """
        self.take_back_storage(storage_key(tensor), words)

    def take_back_storage(self, key: int, words: str) -> None:
        """Raise an error with ``words`` at each read of the storage at ``key`` from now on."""
        self._machine.storages.taken_back[key] = words

    def give_again(self, key: int) -> None:
        """Allow reading the storage at ``key`` again."""
        self._machine.storages.taken_back.pop(key, None)

    def are_at(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int | None],
        indices: Sequence[int],
    ) -> bool:
        """Return whether each of ``tensors[indices]`` lies at its address."""
        return all(tensors[index].data_ptr() == addresses[index] for index in indices)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions of ``torch._C``."""
    surface = _Surface(machine)
    for name, function in {
        "_cuda_getCheckpointState": surface.get,
        "_cuda_setCheckpointPoolState": surface.set,
        "_construct_storage_from_data_pointer": surface.storage,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": surface.tensor,
        "_has_Standard_Deleter": surface.has_own_memory,
        "_free_And_Remove_DeleterFn": surface.release,
        "_tensors_data_ptrs_at_indices_equal": surface.are_at,
        "_set_storage_access_error_msg": surface.take_back,
        "_set_storage_data_ptr_access_error_msg": surface.take_back_storage,
        "_clear_storage_data_ptr_access_error_msg": surface.give_again,
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cudnn_set_conv_benchmark_empty_cache": _nothing,
    }.items():
        patches.add(torch._C, name, function)


def _nothing(*_: Any) -> None: ...
