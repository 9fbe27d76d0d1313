"""``torch.save`` of tensors of unknown values: their shapes are written, and marked.

A file of made-up numbers could be taken for a checkpoint. So such a tensor is saved as a call of
:func:`restore_unknown`, which makes one of unknown values inside a simulation and raises anywhere
else. Tensors whose values are known are saved as torch saves them.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches, having
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_machine: SimulatedMachine | None = None
"""The machine that files are loaded on: pickle calls functions by name, with data of the file."""


def loading_on(machine: SimulatedMachine) -> AbstractContextManager[None]:
    """Make tensors of unknown values that are loaded inside belong to ``machine``."""
    return having(sys.modules[__name__], "_machine", machine)


def gives_no_values() -> bool:
    """Return whether safetensors has memory of tensors without values that is still alive."""
    return _machine is not None and bool(_machine.storages.without_values)


class SavedStorage:
    """A storage in a file: tensors that share it do so again when they are loaded."""

    def __init__(self, nbytes: int, location: str) -> None:
        self.nbytes = nbytes
        self.location = location
        self.memory: Tensor | None = None
        """The tensor that stands for it, while the file is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return saved_storage, (self.nbytes, self.location)


def saved_storage(nbytes: int, location: str) -> SavedStorage:
    """Return the storage of ``nbytes`` bytes that was saved from the device ``location``."""
    return SavedStorage(nbytes, location)


def restore_unknown(
    storage: SavedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
) -> Tensor:
    """Make a tensor of unknown values; raises ``RuntimeError`` outside a simulation."""
    if _machine is None:
        raise RuntimeError(
            "this file was saved on a simulated GPU, which had no values to save; save it inside "
            "simulate(..., real_values=True) or on a GPU"
        )
    device = torch.device(_destination(storage.location))
    if storage.memory is None:
        if device.type == "cpu":
            storages = _machine.storages
            storage.memory = storages.new_unknown_on_cpu((storage.nbytes,), (1,), torch.uint8)
        else:
            storage.memory = torch.empty(storage.nbytes, dtype=torch.uint8, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(storage.memory.untyped_storage(), offset, size, stride)
    return tensor.requires_grad_(requires_grad)


# torch.load allows no others by default; neither can do more than make an empty tensor.
torch.serialization.add_safe_globals([saved_storage, restore_unknown])


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace how tensors of unknown values are pickled and copied."""
    kept: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
    """By key: the stand-in for a storage, for as long as a pickler refers to it."""

    def is_unknown(tensor: Tensor) -> bool:
        if machine.storages.is_unknown_on_cpu(tensor):
            return True
        if not raw.is_meta(tensor) or machine.execution.inside_here:
            return False
        return machine.storages.of(tensor) is not None and machine.values.of(tensor) is None

    def reduce_tensor(reduce: Callable[..., Any], tensor: Tensor, proto: int) -> Any:
        if not is_unknown(tensor):
            return reduce(tensor, proto)
        machine.note(
            f"torch.save or pickle at {user_line()} saved tensors whose values were not computed: "
            f"the file holds shapes, and can be loaded in a simulation only"
        )
        storage = tensor.untyped_storage()
        saved = kept.get(storage._cdata)
        if saved is None:
            saved = kept[storage._cdata] = SavedStorage(storage.nbytes(), str(tensor.device))
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return restore_unknown, (saved, tensor.dtype, *place, tensor.requires_grad)

    def copy_tensor(tensor: Tensor) -> Any:
        if not is_unknown(tensor) or type(tensor) is not Tensor:
            return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))  # type: ignore[attr-defined]  # as copy() itself
        copied = tensor.detach().requires_grad_(tensor.requires_grad)
        copied.__dict__.update(tensor.__dict__)
        return copied

    patches.wrap(Tensor, "_reduce_ex_internal", reduce_tensor)
    patches.add(Tensor, "__copy__", copy_tensor)
    patches.wrap(torch.TypedStorage, "__reduce__", _reduce)


def load_storage(content: bytes, location: str) -> Any:
    """Return the storage that was pickled as ``content``, on the device ``location``."""
    storage: Any = torch.load(io.BytesIO(content), weights_only=False)
    return _typed(storage._untyped_storage.cuda(torch.device(location).index), storage.dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    # As in torch's own code: other calls warn that the class is deprecated.
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _reduce(reduce: Callable[..., Any], storage: Any) -> Any:
    device = storage._untyped_storage.device
    if device.type != "cuda":
        return reduce(storage)
    # In C++ pickle would read the storage's memory, which does not exist.
    content = io.BytesIO()
    on_cpu = _typed(storage._untyped_storage.cpu(), storage.dtype)
    torch.save(on_cpu, content, _use_new_zipfile_serialization=False)
    return load_storage, (content.getvalue(), str(device))


def _destination(location: str) -> str:
    """Return where ``torch.load`` puts a tensor that was saved from ``location``."""
    local = getattr(torch.serialization, "_serialization_tls", None)
    target = getattr(local, "map_location", None)
    if isinstance(target, dict):
        return str(target.get(location, location))
    if callable(target):
        moved = target(torch.UntypedStorage(0), location)
        return location if moved is None else str(moved.device)
    return location if target is None else str(target)
