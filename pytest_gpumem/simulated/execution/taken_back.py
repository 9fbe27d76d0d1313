"""Results of CUDA graphs whose memory a later run has used again: reading them raises an error.

On a GPU an operator that asks such a tensor for its storage, or the storage for its address,
raises the error that compiled code has set before. Here operators that only view are refused, too.

Source: c10/core/TensorImpl.h (release_storage_and_set_meta_custom_data_ptr_error_msg_),
StorageImpl.h (release_data_and_set_meta_custom_data_ptr_error_msg_), torch 2.6 to 2.15.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.execution.factories import is_factory
from pytest_gpumem.simulated.machine.storages import Storages, storage_key


def refuse(storages: Storages, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Raise where ``func`` reads memory that has been taken back."""
    if _reads(func):
        for tensor in tensors_in((args, kwargs or {})):
            storages.refuse_taken_back(storage_key(tensor))


@cache
def _reads(func: Any) -> bool:
    """Return whether ``func`` uses more of its tensors than their shapes."""
    name = func._schema.name
    return name == "aten::_to_copy" or not (name == "aten::detach" or is_factory(func))
