"""Reads of a tensor's values, and its items."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.values.assumptions import taken_for_granted
from pytest_gpumem.simulated.machine.values.neutral import (
    NeutralFloat,
    NeutralInt,
    neutral_integers,
)
from pytest_gpumem.simulated.operators import transfers
from pytest_gpumem.simulated.surface.factories import asked_for_meta
from pytest_gpumem.simulated.surface.several import brought
from pytest_gpumem.simulated.surface.tensor_facts import TensorFacts
from pytest_gpumem.values.errors import UnknownValueError

_bool = raw.base("__bool__")
_tolist = raw.base("tolist")
_item = raw.base("item")
_getitem = raw.base("__getitem__")
_setitem = raw.base("__setitem__")
_numpy = raw.base("numpy")

_Truth = bool
"""``bool`` is a method below."""


class TensorReads(TensorFacts):
    """``item``, ``tolist``, ``numpy``, conditions and indexing."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine)
        self._array: Any = torch.Tensor.__array__

    def bool(self, tensor: torch.Tensor) -> bool:
        asking = sys._getframe(2)
        granted = taken_for_granted(asking)
        if granted and tensor.__class__ not in raw.PLAIN and hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # of a DTensor, whose shards are read as well
        if granted and self._is_open(tensor):
            answer, note = granted
            self._machine.note(note)
            return answer
        known = self._known(tensor)
        if known is not None:
            return bool(_bool(known))
        self._refuse(tensor, _condition_of(asking))
        return bool(_bool(tensor))

    def getitem(self, tensor: torch.Tensor, index: Any) -> Any:
        if self._machine.has_real_meta and self.is_meta(tensor):
            return asked_for_meta(self._machine, _getitem, (tensor, index), {})
        return _getitem(tensor, self._as_indices(tensor, index))

    def setitem(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        if self._machine.placement is not None:
            value = brought(self._machine, tensor, value)
        index = self._as_indices(tensor, index)
        here = self._machine.thread_state
        before, here.sets_items = here.sets_items, True
        try:
            _setitem(tensor, index, value)
        finally:
            here.sets_items = before

    def _as_indices(self, tensor: torch.Tensor, index: Any) -> Any:
        """``tensor[[0, 2]]``: the list becomes a tensor on the device, which C++ does unseen.

        Source: torch/csrc/autograd/python_variable_indexing.cpp (sequenceToVariable).
        """
        if index.__class__ is list:
            return self._as_index(tensor, index)
        if index.__class__ is tuple and any(part.__class__ is list for part in index):
            return tuple([self._as_index(tensor, part) for part in index])
        return index

    def _as_index(self, tensor: torch.Tensor, index: Any) -> Any:
        plain = index.__class__ is list and all(item.__class__ is int for item in index)
        block = self._block(tensor) if plain else None
        if block is None or not index:
            return index
        return torch.tensor(index, device=block.device.torch_device)

    def item(self, tensor: torch.Tensor) -> Any:
        value = _item(tensor)
        # In C++ it has become a plain number.
        if isinstance(value, float) and self._is_unknown(tensor):
            return NeutralFloat(value)
        return value

    def tolist(self, tensor: torch.Tensor) -> Any:
        block, known = self._block(tensor), self._known(tensor)
        if block is not None and known is not None:
            transfers.stage_move(block.device, tensor, {})
            return _tolist(known)
        if self._has_neutral_integers(tensor, "tolist()"):
            return neutral_integers(tensor.shape)
        self._refuse(tensor, "tolist()")
        return _tolist(tensor)

    def numpy(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if self._storages.is_on_host(tensor) and self._has_neutral_integers(tensor, "numpy()"):
            return _neutral_array(tuple(tensor.shape))
        self._refuse_numpy(tensor)
        return _numpy(tensor, **kwargs)

    def array(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = not args and kwargs.get("dtype") is None and self._storages.is_on_host(tensor)
        if plain and self._has_neutral_integers(tensor, "numpy()"):
            return _neutral_array(tuple(tensor.shape))
        self._refuse_numpy(tensor)
        return self._array(tensor, *args, **kwargs)

    def _has_neutral_integers(self, tensor: torch.Tensor, read: str) -> _Truth:
        """Return whether reading all of ``tensor`` yields neutral integers, which is then noted."""
        if not self._is_unknown(tensor) or not tensor.dim():
            return False
        block = self._block(tensor)
        if not self._machine.reads_neutral_integers(tensor, read):
            return False
        if block is not None:
            self._machine.streams.host_waits(block.device.index)
            transfers.stage_move(block.device, tensor, {})
        return True

    def _is_open(self, tensor: torch.Tensor) -> _Truth:
        """Return whether a device tensor's values are unknown, or go back to an assumption."""
        if self._block(tensor) is None or self._values.everything:
            return False
        return self._values.of(tensor) is None or self._values.facts.is_assumed((tensor,))

    def _is_known(self, tensor: torch.Tensor) -> _Truth:
        return self._block(tensor) is not None and self._values.of(tensor) is not None

    def _refuse_numpy(self, tensor: torch.Tensor) -> None:
        self._refuse_on_host(tensor, "numpy()")
        block = self._block(tensor)
        if block is not None:
            raise TypeError(
                f"can't convert {block.device.torch_device} device type tensor to numpy. Use "
                f"Tensor.cpu() to copy the tensor to host memory first."
            )

    def _refuse(self, tensor: torch.Tensor, read: str) -> None:
        self._refuse_on_host(tensor, read)
        block = self._block(tensor)
        if block is not None:
            self._storages.refuse_taken_back(block.key)
            raise UnknownValueError(self._unknown(read))


def _condition_of(frame: FrameType) -> str:
    """Name the read of a condition, and torch's module if the condition is there."""
    module = str(frame.f_globals.get("__name__", ""))
    return f"bool() in {module}" if module.startswith("torch.") else "bool()"


def _neutral_array(shape: tuple[int, ...]) -> Any:
    """Return an array of objects: one of numbers could not show that they are unknown."""
    import numpy as np

    array = np.empty(shape, dtype=object)
    array.fill(NeutralInt())
    return array
