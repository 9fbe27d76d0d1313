"""Factory functions: tensors the user makes on ``meta`` on purpose hold no CUDA memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def plan(simulation: Simulation, patches: Patches) -> None:
    """Watch for ``device="meta"``, which otherwise stands for CUDA inside a simulation."""
    _device_constructors()  # torch caches this set of functions: it must hold the real ones.
    for name in _FACTORIES:
        patches.plan(torch, name, _watching(simulation, getattr(torch, name)))
    as_tensor = _as_tensor(torch.as_tensor)
    through = _context(simulation, DeviceContext.__torch_function__, torch.as_tensor, as_tensor)
    patches.plan(DeviceContext, "__torch_function__", through)
    patches.plan(torch, "as_tensor", as_tensor)
    patches.plan(torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to))


def _parse_to(parse_to: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return parse_to(*args, **kwargs)

    return call


def _is_meta(device: Any) -> bool:
    if device is None:
        return False
    return device == "meta" or (isinstance(device, torch.device) and device.type == "meta")


def _watching(simulation: Simulation, factory: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):
            # A build without CUDA does not know whose number that is.
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        # Meta kernels written in Python make their outputs on meta too.
        if _is_meta(kwargs.get("device")) and not simulation.execution.inside:
            return _making_real_meta(simulation, factory, args, kwargs)
        return factory(*args, **kwargs)

    return call


def _context(
    simulation: Simulation,
    torch_function: Callable[..., Any],
    real_as_tensor: Callable[..., Any],
    as_tensor: Callable[..., Any],
) -> Callable[..., Any]:
    def call(
        context: Any,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is real_as_tensor and not (kwargs or {}).get("device"):
            return as_tensor(*args, **{**(kwargs or {}), "device": context.device})
        if _is_meta(context.device) and not (kwargs or {}).get("device"):
            return _making_real_meta(
                simulation, torch_function, (context, func, types, args, kwargs), {}
            )
        return torch_function(context, func, types, args, kwargs)

    return call


def _making_real_meta(
    simulation: Simulation,
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    before = simulation.making_real_meta
    simulation.making_real_meta = simulation.has_real_meta = True
    try:
        return factory(*args, **kwargs)
    finally:
        simulation.making_real_meta = before


def _as_tensor(as_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def call(data: Any, dtype: Any = None, device: Any = None) -> Any:
        # In C++ as_tensor copies to the device out of sight of any dispatch mode.
        if device is None or torch.device(device).type != "cuda":
            return as_tensor(data, dtype=dtype, device=device)
        if isinstance(data, torch.Tensor):
            return data.to(device, dtype)
        return as_tensor(data, dtype=dtype, device="cpu").to(device)

    return call
