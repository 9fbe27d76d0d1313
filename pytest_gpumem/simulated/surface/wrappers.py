"""Tensors that hold others and report their own device: quantised weights, jagged tensors.

To C++ a wrapper on a simulated GPU is on ``meta`` like its tensors: autograd and the engine look
for a driver of any other device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_PLACE = "_pytest_gpumem_device"
"""Attribute for a wrapper's device: a weak reference to it would make ``swap_tensors`` fail."""
_NAMES = (
    *("strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory"),
    *("requires_grad", "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout"),
    *("_extra_dispatch_keys", "storage_size"),
)
"""Parameters of ``_make_wrapper_subclass`` after a class and its sizes, in order (2.6 to 2.15).

Source: torch/csrc/autograd/python_variable.cpp (THPVariable_make_wrapper_subclass).
"""
_HANDLES_NOTHING = torch._C._disabled_torch_dispatch_impl


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make wrappers on ``meta``, each with the device that the caller named."""
    base, kind = torch.Tensor, fake_tensor.FakeTensor
    state_of: Callable[..., Any] = torch._utils._get_obj_state
    common_device: Callable[..., Any] = kind._find_common_device

    def without_place(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(without_place(part) for part in state)
        if not isinstance(state, dict) or _PLACE not in state:
            return state
        return {name: value for name, value in state.items() if name != _PLACE}

    @functools.wraps(common_device)
    def find_common_device(function: Any, arguments: Sequence[Any]) -> Any:
        # C++ makes tensors of Python's numbers on the device of a GPU's fake tensor, which is
        # meta here (TensorCompare.cpp, where with a scalar).
        if any(_is_fake(one, "cuda") for one in arguments):
            arguments = [one for one in arguments if not (_is_fake(one, "meta") and not one.dim())]
        return common_device(function, arguments)

    patches.add(base, "_make_wrapper_subclass", making(machine, base._make_wrapper_subclass))
    # A pickled wrapper may be loaded elsewhere.
    patches.add(torch._utils, "_get_obj_state", lambda obj: without_place(state_of(obj)))
    # In 2.6 it makes a tensor on the device, and so needs its driver.
    patches.add(fake_tensor, "init_gpu_context", lambda device: None)
    patches.add(base, "_make_subclass", faking(base._make_subclass))
    patches.add(kind, "_find_common_device", staticmethod(find_common_device))


def place_of(wrapper: torch.Tensor) -> torch.device | None:
    """Return the GPU that a wrapper on ``meta`` reports; ``None`` for any other tensor."""
    if wrapper.__class__ in raw.PLAIN:
        return None
    place: torch.device | None = wrapper.__dict__.get(_PLACE)
    # C++ makes a DTensor unseen (THPVariable_dtensor_new), on the device of its shard.
    shard = getattr(wrapper, "_local_tensor", None) if place is None else None
    return shard.device if isinstance(shard, torch.Tensor) else place


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` handles operators itself."""
    kind = tensor.__class__
    return kind not in raw.PLAIN and kind.__torch_dispatch__ is not _HANDLES_NOTHING


def making(machine: SimulatedMachine, make: Callable[..., Any]) -> Any:
    """Wrap ``_make_wrapper_subclass``: wrappers of a GPU are on ``meta`` and remember the GPU."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Jagged tensors pass everything by position.
        given = dict(zip(_NAMES, args[2:], strict=False)) | kwargs
        device = given.get("device")
        if device is None or given.get("dispatch_device"):
            return make(*args, **kwargs)
        place = torch.device("cuda", device) if type(device) is int else torch.device(device)
        if place.type != "cuda":
            return make(*args, **kwargs)
        made = make(*args[:2], **{**given, "device": "meta"})
        made.__dict__[_PLACE] = machine.device(place.index).torch_device
        return made

    return staticmethod(call)


def faking(make: Callable[..., Any]) -> Any:
    """Wrap the making of ``FakeTensor``, which reports its device itself: C++ needs no driver.

    Source: torch/_subclasses/fake_tensor.py (FakeTensor.__new__), torch 2.6 to 2.15.
    """

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if keys is not None and keys.type == "cuda":
            kwargs |= {"device_for_backend_keys": torch.device("meta"), "dispatch_device": False}
        return make(*args, **kwargs)

    return staticmethod(call)


def _is_fake(value: Any, place: str) -> bool:
    return isinstance(value, fake_tensor.FakeTensor) and value.fake_device.type == place
