"""``torch.UntypedStorage`` and its methods, for memory of a simulated GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pytest_gpumem.simulated.common.callsite import refuse
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_device: Any = vars(torch._C.StorageBase)["device"]
_resize: Any = torch.UntypedStorage.resize_


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace properties of storages, and the methods that resize and copy them."""
    storages, storage = machine.storages, torch.UntypedStorage
    copy: Any = storage.copy_

    def device_of(this: torch.UntypedStorage) -> torch.device:
        record = storages.by_key.get(this._cdata)
        return _device.__get__(this) if record is None else record.device.torch_device

    def resize_(this: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Take a new block of CUDA memory, whatever the old one's size.

        Source: aten/src/ATen/native/cuda/Resize.cpp (resize_bytes_cuda), torch 2.6 to 2.15.
        """
        record = storages.by_key.get(this._cdata)
        _resize(this, size)
        if record is not None:
            machine.values.forget(record.key)
            storages.reallocate(record, size)
        return this

    def is_unknown(this: torch.UntypedStorage) -> bool:
        if this._cdata in storages.unknown_on_cpu:
            return True
        return this._cdata in storages.by_key and machine.values.of_storage(this) is None

    def copy_(
        this: torch.UntypedStorage, source: torch.UntypedStorage, *args: Any, **options: Any
    ) -> torch.UntypedStorage:
        """Copy; unknown values copied to the host become NaN.

        Source: aten/src/ATen/StorageUtils.cpp (storage_copy), torch 2.6 to 2.15.
        """
        if this._cdata in storages.by_key or not is_unknown(source):
            copy(this, source, *args, **options)
            whole = vars(this).get("sliced")
            if whole is not None and is_unknown(this):
                machine.values.forget(whole._cdata)
            return this
        size = this.nbytes()
        dtype = next(kind for kind in _NUMBERS if size % kind.itemsize == 0)
        with torch.no_grad():
            _whole(this, dtype).copy_(_whole(source, dtype), *args, **options)
        return this

    patches.add(storage, "__new__", staticmethod(_made))
    patches.add(storage, "device", property(device_of))
    patches.add(storage, "resize_", resize_)
    patches.add(storage, "copy_", copy_)
    for name in ("_share_cuda_", "share_memory_", "is_shared", "__getitem__"):
        patches.wrap(storage, name, partial(_guarded, machine, name))


def _made(kind: type, /, *args: Any, device: Any = None, **options: Any) -> Any:
    if device is None or torch.device(device).type != "cuda":
        if device is not None:
            options["device"] = device
        return torch._C.StorageBase.__new__(kind, *args, **options)
    size = args[0] if args else 0
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


def _whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


_NUMBERS = (torch.float32, torch.bfloat16, torch.float8_e5m2)
"""Types with NaN, by descending size: any storage can be filled with one of them."""

_WHY = {
    "_share_cuda_": "hands memory of a simulated GPU to another process, which does not have it",
    "share_memory_": "hands values of a simulated GPU to another process, which it does not have",
    "__getitem__": "reads memory of a simulated GPU, which holds no values",
}


def _part(
    machine: SimulatedMachine, storage: torch.UntypedStorage, part: slice
) -> torch.UntypedStorage:
    """Return a storage of some bytes of ``storage``, which it keeps alive.

    Source: torch/csrc/Storage.cpp (THPStorage_get), torch 2.6 to 2.15.
    """
    start, stop, _ = part.indices(storage.nbytes())
    made = torch.UntypedStorage(max(stop - start, 0), device="meta")
    record = machine.storages.by_key[storage._cdata]
    machine.storages.refer(made, record.pointer + start, record.device)
    vars(made)["sliced"] = storage
    known = machine.values.of_storage(storage)
    if known is not None:
        machine.values.put(made._cdata, _whole(known[part], torch.uint8))
    return made


def _guarded(
    machine: SimulatedMachine, name: str, method: Any, storage: Any, *args: Any, **options: Any
) -> Any:
    if storage._cdata in machine.storages.by_key:
        # CUDA memory is shared in any case: share_memory_() does nothing to it.
        if name in ("is_shared", "share_memory_"):
            return True if name == "is_shared" else storage
        known = machine.values.of_storage(storage)
        if name == "__getitem__" and isinstance(args[0], slice):
            return _part(machine, storage, args[0])
        if known is not None and name == "__getitem__":  # tolist() calls it
            return method(known, *args, **options)
    elif name == "is_shared" or storage._cdata not in machine.storages.unknown_on_cpu:
        return method(storage, *args, **options)
    return refuse(f"torch.UntypedStorage.{name}", _WHY[name])
