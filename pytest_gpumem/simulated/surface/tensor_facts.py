"""A tensor's properties, and whether its values are known."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import callers_line, is_own, user_line
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import SimulatedStorage
from pytest_gpumem.simulated.surface.wrappers import place_of
from pytest_gpumem.values.errors import UnknownValueError

_get_device = raw.base("get_device")
_data_ptr = raw.base("data_ptr")


class TensorFacts:
    """Attributes and addresses of the tensors of one machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._storages = machine.storages
        self._values = machine.values
        self._repr: Any = torch.Tensor.__repr__
        self._storage_data_ptr = torch.UntypedStorage.data_ptr

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
        return place_of(tensor) or raw.device(tensor)

    def is_cuda(self, tensor: torch.Tensor) -> bool:
        if self._block(tensor) is not None:
            return True
        # A wrapper: it has no storage, and a fake tensor reports its own device.
        return tensor.__class__ not in raw.PLAIN and tensor.device.type == "cuda"

    def is_cpu(self, tensor: torch.Tensor) -> bool:
        return self.device(tensor).type == "cpu"

    def is_meta(self, tensor: torch.Tensor) -> bool:
        device = self.device(tensor) if tensor.__class__ in raw.PLAIN else tensor.device
        return device.type == "meta"

    def get_device(self, tensor: torch.Tensor) -> int:
        block = self._block(tensor)
        return int(_get_device(tensor)) if block is None else block.device.index

    def data_ptr(self, tensor: torch.Tensor) -> int:
        block = self._block(tensor)
        if block is None:
            if self._storages.is_on_host(tensor) and _is_asked_to_save():
                offset = int(tensor.storage_offset()) * tensor.element_size()
                return self._without_values(tensor.untyped_storage()) + offset
            self._refuse_on_host(tensor, "data_ptr()")
            return int(_data_ptr(tensor))
        self._storages.refuse_taken_back(block.key)
        return block.pointer + int(tensor.storage_offset()) * tensor.element_size()

    def storage_data_ptr(self, storage: torch.UntypedStorage) -> int:
        block = self._storages.by_key.get(storage._cdata)
        if block is not None:
            self._storages.refuse_taken_back(block.key)
            return block.pointer
        if storage._cdata in self._storages.on_host:
            if _is_asked_to_save():
                return self._without_values(storage)
            # There is nothing to be read there: ctypes would take it for empty.
            raise UnknownValueError(self._unknown("data_ptr()"))
        return self._storage_data_ptr(storage)

    def _without_values(self, storage: torch.UntypedStorage) -> int:
        self._machine.note(
            f"safetensors at {callers_line()} wrote the shapes of tensors and no values: what it "
            f"wrote is no number"
        )
        return self._storages.address_without_values(storage)

    def repr(self, tensor: torch.Tensor, **kwargs: Any) -> str:
        device = self.device(tensor)
        is_real = not raw.is_meta(tensor) and not self._storages.is_on_host(tensor)
        if is_real or device.type == "meta":
            return str(self._repr(tensor, **kwargs))
        known = self._known(tensor)
        if known is not None:
            contents = str(torch._tensor_str._tensor_str(known, len("tensor(")))
            return str(self._repr(tensor, **{"tensor_contents": contents, **kwargs}))
        return (
            f"tensor(..., device='{device}', size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype}{_gradient(tensor)})"
        )

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        block = self._block(tensor)
        if block is None:
            return None
        self._machine.streams.host_waits(block.device.index)
        return self._values.known(tensor)

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        if self._storages.is_on_host(tensor):
            return True
        return self._block(tensor) is not None and self._values.of(tensor) is None

    def _refuse_on_host(self, tensor: torch.Tensor, read: str) -> None:
        if self._storages.is_on_host(tensor):
            raise UnknownValueError(self._unknown(read))

    def _unknown(self, read: str) -> str:
        return self._values.refusal(f"{read} at {user_line()} depends on")


def _is_asked_to_save() -> bool:
    """Return whether safetensors calls: it writes memory at an address (safetensors/torch.py)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    asking = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return asking.partition(".")[0] == "safetensors"


def _gradient(tensor: torch.Tensor) -> str:
    """Return the autograd part of a printed tensor (``_str_intern`` in torch/_tensor_str.py)."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view whose base was overwritten in a way that has no graph
        return ", grad_fn=<Invalid>"
    if node is not None:
        return f", grad_fn=<{type(node).__name__}>"
    return ", requires_grad=True" if tensor.requires_grad else ""
