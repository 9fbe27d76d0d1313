"""Tensors that hold others and say themselves where they are: quantised weights, jagged tensors.

To C++ a wrapper on a simulated GPU is on ``meta`` like what it holds, so that autograd and the
engine, which look for a driver of any other device, take both for the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated import raw

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation

_PLACE = "_pytest_gpumem_device"
"""Where a wrapper keeps what it says: weak references would keep it from being swapped."""
_HANDLES_NOTHING = torch._C._disabled_torch_dispatch_impl


def plan(simulation: Simulation, patches: Patches) -> None:
    """Make wrappers on ``meta``, each with the device that it was told."""
    base = torch.Tensor
    patches.plan(base, "_make_wrapper_subclass", _making(simulation, base._make_wrapper_subclass))


def place_of(wrapper: torch.Tensor) -> torch.device | None:
    """The GPU that a wrapper on ``meta`` says it is on; ``None`` for any other tensor."""
    if wrapper.__class__ in raw.PLAIN:
        return None
    place: torch.device | None = wrapper.__dict__.get(_PLACE)
    return place


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` handles operators itself."""
    kind = tensor.__class__
    return kind not in raw.PLAIN and kind.__torch_dispatch__ is not _HANDLES_NOTHING


def _making(simulation: Simulation, make: Callable[..., Any]) -> Any:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or kwargs.get("dispatch_device"):
            return make(*args, **kwargs)
        place = torch.device("cuda", device) if type(device) is int else torch.device(device)
        if place.type != "cuda":
            return make(*args, **kwargs)
        made = make(*args, **{**kwargs, "device": "meta"})
        made.__dict__[_PLACE] = simulation.device(place.index).torch_device
        return made

    return staticmethod(call)
