"""A tensor's properties, reads of its values, and its items."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from numbers import Integral
from types import FrameType
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import callers_line, is_own, user_line
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import SimulatedStorage
from pytest_gpumem.simulated.machine.values.assumptions import assumption_of, is_printing, printing
from pytest_gpumem.simulated.machine.values.placeholder import (
    PlaceholderFloat,
    PlaceholderInt,
    dots,
    placeholder_integers,
)
from pytest_gpumem.simulated.operators import transfers
from pytest_gpumem.simulated.surface.factories import asked_for_meta
from pytest_gpumem.simulated.surface.several import copied_to_gpu_of
from pytest_gpumem.simulated.surface.wrappers import place_of
from pytest_gpumem.values.errors import UnknownValueError

_data_ptr = raw.base("data_ptr")
_bool = raw.base("__bool__")
_tolist = raw.base("tolist")
_item = raw.base("item")
_getitem = raw.base("__getitem__")
_setitem = raw.base("__setitem__")
_numpy = raw.base("numpy")

_Truth = bool
"""The type; in the class below ``bool`` is a method."""


_SEQUENCES: frozenset[Any] = frozenset({list, tuple, range})


def _leaves(sequence: Any) -> Iterator[Any]:
    for item in sequence:
        if item.__class__ in _SEQUENCES:
            yield from _leaves(item)
        else:
            yield item


class TensorReads:
    """Attributes, addresses and values of the tensors of one machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._storages = machine.storages
        self._values = machine.values
        self._repr: Any = torch.Tensor.__repr__
        self._array: Any = torch.Tensor.__array__

    def _block(self, tensor: torch.Tensor) -> SimulatedStorage | None:
        if not raw.is_meta(tensor) or self._machine.execution.inside_here:
            return None
        return self._storages.of(tensor)

    def device(self, tensor: torch.Tensor) -> torch.device:
        if not raw.is_meta(tensor) or self._machine.execution.inside_here:
            return raw.device(tensor)
        block = self._storages.of(tensor)
        if block is not None:
            return block.device.torch_device
        if self._storages.is_seed(tensor):
            return torch.device("cpu")
        return place_of(tensor) or raw.device(tensor)

    def is_cuda(self, tensor: torch.Tensor) -> _Truth:
        if self._block(tensor) is not None:
            return True
        # A wrapper has no storage, and a fake tensor reports its own device.
        return tensor.__class__ not in raw.PLAIN and tensor.device.type == "cuda"

    def is_cpu(self, tensor: torch.Tensor) -> _Truth:
        return self.device(tensor).type == "cpu"

    def is_meta(self, tensor: torch.Tensor) -> _Truth:
        device = self.device(tensor) if tensor.__class__ in raw.PLAIN else tensor.device
        return device.type == "meta"

    def get_device(self, tensor: torch.Tensor) -> int:
        index: int | None = tensor.device.index  # of a wrapper, too, which has no storage
        return -1 if index is None else index

    def data_ptr(self, tensor: torch.Tensor) -> int:
        block = self._block(tensor)
        if block is None:
            if self._storages.is_unknown_on_cpu(tensor) and _is_asked_to_save():
                offset = int(tensor.storage_offset()) * tensor.element_size()
                return self._without_values(tensor.untyped_storage()) + offset
            self._refuse_on_host(tensor, "data_ptr()")
            return int(_data_ptr(tensor))
        self._storages.refuse_reused(block.key)
        return block.pointer + int(tensor.storage_offset()) * tensor.element_size()

    def storage_data_ptr(self, address: Any, storage: torch.UntypedStorage) -> int:
        block = self._storages.by_key.get(storage._cdata)
        if block is not None:
            self._storages.refuse_reused(block.key)
            return block.pointer
        if storage._cdata in self._storages.unknown_on_cpu:
            if _is_asked_to_save():
                return self._without_values(storage)
            # No memory is to be read there: ctypes would find it empty.
            raise UnknownValueError(self._unknown("data_ptr()"))
        return int(address(storage))

    def _without_values(self, storage: torch.UntypedStorage) -> int:
        self._machine.note(
            f"safetensors at {callers_line()} saved tensors whose values were not computed: the "
            f"file holds shapes and no usable values"
        )
        return self._storages.address_without_values(storage)

    def repr(self, tensor: torch.Tensor, **kwargs: Any) -> str:
        """Format ``tensor`` by operators of its device, as torch does; unknown numbers are dots."""
        block, device = self._block(tensor), self.device(tensor)
        is_real = not raw.is_meta(tensor) and not self._storages.is_unknown_on_cpu(tensor)
        if is_real or device.type == "meta":
            return str(self._repr(tensor, **kwargs))
        is_unknown = self._is_unknown(tensor)
        if block is not None and tensor.layout is torch.strided:
            self._machine.streams.host_waits(block.device.index)
            with torch.no_grad(), printing():
                contents = torch._tensor_str._tensor_str(tensor, len("tensor("))
            kwargs = {"tensor_contents": contents, **kwargs}
        if not is_unknown:
            return str(self._repr(tensor, **kwargs))
        return dots(tensor, device)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        block = self._block(tensor)
        if block is None:
            return None
        self._machine.streams.host_waits(block.device.index)
        return self._values.known(tensor)

    def _is_unknown(self, tensor: torch.Tensor) -> _Truth:
        if self._storages.is_unknown_on_cpu(tensor):
            return True
        return self._block(tensor) is not None and self._values.of(tensor) is None

    def _refuse_on_host(self, tensor: torch.Tensor, read: str) -> None:
        if self._storages.is_unknown_on_cpu(tensor):
            raise UnknownValueError(self._unknown(read))

    def _unknown(self, read: str) -> str:
        return self._values.refusal(f"{read} at {user_line()} depends on")

    def bool(self, tensor: torch.Tensor) -> bool:
        asking = sys._getframe(2)
        granted = assumption_of(asking)
        if granted and tensor.__class__ not in raw.PLAIN and hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # of a DTensor, whose shards are read as well
        block = self._block(tensor)
        if granted and block is not None and self._is_undecided(tensor):
            answer, note = granted
            self._machine.assume(note)
            self._machine.streams.host_waits(block.device.index)
            return answer
        known = self._known(tensor)
        if known is not None:
            return bool(_bool(known))
        module = str(asking.f_globals.get("__name__", ""))
        self._refuse(tensor, f"bool() in {module}" if module.startswith("torch.") else "bool()")
        return bool(_bool(tensor))

    def getitem(self, tensor: torch.Tensor, index: Any) -> Any:
        if self._machine.has_real_meta and self.is_meta(tensor):
            return asked_for_meta(self._machine, _getitem, (tensor, index), {})
        return _getitem(tensor, self._as_indices(tensor, index))

    def setitem(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        if self._machine.placement is not None:
            value = copied_to_gpu_of(self._machine, tensor, value)
        index = self._as_indices(tensor, index)
        with having(self._machine.thread_state, "sets_items", True):
            _setitem(tensor, index, value)

    def _as_indices(self, tensor: torch.Tensor, index: Any) -> Any:
        """Return ``index`` with tensors on the device for sequences, which C++ would make unseen.

        Source: torch/csrc/autograd/python_variable_indexing.cpp (sequenceToVariable,
        treatSequenceAsTuple: a short list of sequences is a tuple of them).
        """
        kind = index.__class__
        if kind is tuple or (kind is list and len(index) < 32):
            if any(part.__class__ in _SEQUENCES for part in index):
                return kind([self._as_index(tensor, part) for part in index])
            if kind is tuple:
                return index
        return self._as_index(tensor, index)

    def _as_index(self, tensor: torch.Tensor, index: Any) -> Any:
        if index.__class__ not in _SEQUENCES or self._block(tensor) is None:
            return index
        kinds = set(map(type, _leaves(index)))
        if not all(issubclass(kind, Integral) for kind in kinds):
            return index
        dtype = torch.bool if kinds == {bool} else torch.int64
        return torch.tensor(index, dtype=dtype, device=tensor.device)

    def item(self, tensor: torch.Tensor) -> Any:
        with having(self._machine.thread_state, "reads_item", True):
            value = _item(tensor)
        # C++ has made it a plain number.
        if self._is_unknown(tensor):
            if isinstance(value, float):
                return PlaceholderFloat(value)
            return PlaceholderInt() if value == 0 and raw.is_integer(tensor.dtype) else value
        return value

    def tolist(self, tensor: torch.Tensor) -> Any:
        block = self._block(tensor)
        known = None if block is None else self._values.known(tensor)
        if block is not None and known is None and is_printing():
            known = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if block is not None and known is not None:
            transfers.stage_move(self._machine.device(block.device.index), tensor, {})
            return _tolist(known)
        if self._has_placeholder_integers(tensor, "tolist()"):
            return placeholder_integers(tensor.shape)
        self._refuse(tensor, "tolist()")
        return _tolist(tensor)

    def numpy(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs.get("force") and self._block(tensor) is not None:
            tensor = tensor.detach().cpu()  # torch/csrc/utils/tensor_numpy.cpp (tensor_to_numpy)
        array = self._placeholder_array(tensor, of_any_type=True)
        return _numpy(tensor, **kwargs) if array is None else array

    def array(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        array = self._placeholder_array(tensor, not args and kwargs.get("dtype") is None)
        return self._array(tensor, *args, **kwargs) if array is None else array

    def _placeholder_array(self, tensor: torch.Tensor, of_any_type: _Truth) -> Any:
        """Return an array for unknown integers of the host, ``None`` for known values."""
        on_host = self._storages.is_unknown_on_cpu(tensor)
        if of_any_type and on_host and self._has_placeholder_integers(tensor, "numpy()"):
            import numpy as np

            # An array of numbers could not show that they are unknown.
            array = np.empty(tuple(tensor.shape), dtype=object)
            array.fill(PlaceholderInt())
            return array
        self._refuse_on_host(tensor, "numpy()")
        block = self._block(tensor)
        if block is not None:
            raise TypeError(
                f"can't convert {block.device.torch_device} device type tensor to numpy. Use "
                f"Tensor.cpu() to copy the tensor to host memory first."
            )
        return None

    def _has_placeholder_integers(self, tensor: torch.Tensor, read: str) -> _Truth:
        """Return whether reading all of ``tensor`` yields placeholders, which is then noted."""
        if not self._is_unknown(tensor) or not tensor.dim():
            return False
        block = self._block(tensor)
        if not self._machine.reads_placeholder_integers(tensor, read):
            return False
        if block is not None:
            transfers.stage_move(self._machine.device(block.device.index), tensor, {})
        return True

    def _is_undecided(self, tensor: torch.Tensor) -> _Truth:
        """Return whether a device tensor's values are unknown, or come from an assumption."""
        if self._block(tensor) is None or self._values.everything:
            return False
        return self._values.of(tensor) is None or self._values.facts.is_assumed((tensor,))

    def _refuse(self, tensor: torch.Tensor, read: str) -> None:
        self._refuse_on_host(tensor, read)
        block = self._block(tensor)
        if block is not None:
            self._storages.refuse_reused(block.key)
            raise UnknownValueError(self._unknown(read))


def _is_asked_to_save() -> bool:
    """Return whether safetensors calls: it writes memory at an address (safetensors/torch.py)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    asking = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return asking.partition(".")[0] == "safetensors"
