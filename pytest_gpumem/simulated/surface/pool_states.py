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
from pytest_gpumem.allocator.snapshot import PoolState
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import BORROWED, storage_key


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions of ``torch._C``."""
    storages = machine.storages

    def pool_state(device: int, pool: PoolId) -> PoolState:
        try:
            return machine.device(device).allocator.pool_state((pool[0], pool[1]))
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None

    def set_pool_state(
        device: int,
        state: PoolState,
        stale_storages: Sequence[int],
        storages_to_own: Sequence[int] = (),
    ) -> None:
        """Set a pool's state; both lists hold the addresses of storages (``_cdata``)."""
        memory = machine.device(device).allocator
        try:
            freed, live = memory.set_pool_state(state)
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None
        if len(set(stale_storages)) < len(freed - live):
            raise RuntimeError(
                "Any stale tensors which are being manually freed must be passed to set checkpoint"
            )
        records = storages.by_key
        for key in stale_storages:
            if key in records and records[key].address in freed:
                records[key].allocator = BORROWED
        for key in storages_to_own:
            if key in records and records[key].address in live:
                records[key].allocator = memory

    def storage_at(pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
        """Return a storage at ``pointer``, which frees nothing."""
        storage = torch.UntypedStorage(nbytes, device="meta")
        record = storages.refer(storage, pointer, machine.device(torch.device(device).index))
        left = machine.pool_contents.behind(pointer, nbytes)
        if left is not None:
            machine.values.put(record.key, left)
        return storage

    def tensor_on(metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=metadata["dtype"], device="cuda")
        return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    def frees_memory(key: int) -> bool:
        record = storages.by_key.get(key)
        return record is not None and record.allocator is not BORROWED

    def release(key: int) -> None:
        """Free the memory of the storage at ``key`` now, and not when it dies."""
        record = storages.by_key[key]
        record.allocator.free(record.address)
        record.allocator = BORROWED

    def take_back(key: int, words: str) -> None:
        """Raise an error with ``words`` at each read of the storage at ``key`` from now on."""
        storages.taken_back[key] = words

    for name, function in {
        "_cuda_getCheckpointState": pool_state,
        "_cuda_setCheckpointPoolState": set_pool_state,
        "_construct_storage_from_data_pointer": storage_at,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_on,
        "_has_Standard_Deleter": frees_memory,
        "_free_And_Remove_DeleterFn": release,
        "_tensors_data_ptrs_at_indices_equal": lambda tensors, addresses, indices: all(
            tensors[index].data_ptr() == addresses[index] for index in indices
        ),
        # torch takes its storage from the tensor; here tensors that share the storage raise, too.
        "_set_storage_access_error_msg": lambda tensor, words: take_back(
            storage_key(tensor), words
        ),
        "_set_storage_data_ptr_access_error_msg": take_back,
        "_clear_storage_data_ptr_access_error_msg": lambda key: storages.taken_back.pop(key, None),
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cudnn_set_conv_benchmark_empty_cache": lambda *_: None,
    }.items():
        patches.add(torch._C, name, function)
