"""Factory functions: what is asked for on ``meta`` by name holds no CUDA memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.jit._builtins
import torch.jit._recursive
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from pytest_gpumem.simulated.shapes import META

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation

_FACTORIES = (
    "arange",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def plan(simulation: Simulation, patches: Patches) -> None:
    """Watch for ``device="meta"``, which otherwise stands for CUDA inside a simulation."""
    _device_constructors()  # torch caches this set of functions: it must hold the real ones.
    for name in _FACTORIES:
        factory = _UNSEEN.get(name, _as_it_is)(getattr(torch, name))
        patches.plan(torch, name, _watching(simulation, factory, getattr(torch, name)))
    for name in ("fftfreq", "rfftfreq"):
        factory = getattr(torch.fft, name)
        patches.plan(torch.fft, name, _watching(simulation, factory, factory))
    sparse = torch.sparse_coo_tensor
    patches.plan(torch, "sparse_coo_tensor", _watching(simulation, _sparse(sparse), sparse))
    for name in _NEW:
        patches.plan(torch.Tensor, name, _new(simulation, getattr(torch.Tensor, name)))
    for module in (torch.jit._builtins, torch.jit._recursive):
        patches.plan(module, "_find_builtin", _finding(torch.jit._builtins._find_builtin))
    as_tensor = _as_tensor(torch.as_tensor)
    through = _context(simulation, DeviceContext.__torch_function__, torch.as_tensor, as_tensor)
    patches.plan(DeviceContext, "__torch_function__", through)
    patches.plan(torch, "as_tensor", as_tensor)
    patches.plan(torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to))


def _parse_to(parse_to: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_numbered(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        return parse_to(*args, **kwargs)

    return call


def _is_meta(device: Any) -> bool:
    if device is None:
        return False
    return device == "meta" or (isinstance(device, torch.device) and device.type == "meta")


def _numbered(device: Any) -> Any:
    # A build without CUDA does not know whose number that is.
    return torch.device("cuda", device) if type(device) is int else device


def _finding(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(function: Any) -> Any:
        # TorchScript knows torch's functions by identity.
        return find(getattr(function, "__wrapped__", function))

    return call


def _new(simulation: Simulation, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
            if _is_meta(kwargs["device"]) and not simulation.execution.inside_here:
                return _asked_for_meta(simulation, method, (tensor, *args), kwargs)
        return method(tensor, *args, **kwargs)

    return call


def _from_arrays(factory: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if (
            device is None
            or torch.device(device).type != "cuda"
            or not hasattr(args[0], "__array__")
        ):
            return factory(*args, **kwargs)
        if isinstance(args[0], torch.Tensor):
            return factory(*args, **kwargs)
        # In C++ an array is copied to the device out of sight of any dispatch mode.
        requires_grad = kwargs.pop("requires_grad", False)
        made = factory(*args, **{**kwargs, "device": "cpu"}).to(device)
        return made.requires_grad_() if requires_grad else made

    return call


def _as_it_is(factory: Callable[..., Any]) -> Callable[..., Any]:
    return factory


def _range(factory: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return factory(*args, **kwargs)
        # In C++ it looks for the device before any dispatch mode sees the operator.
        requires_grad = kwargs.pop("requires_grad", False)
        names = ("start", "end", "step")
        start, end, step = (kwargs.pop(name, None) for name in names)
        numbers = [*args, *(number for number in (start, end, step) if number is not None)]
        made = torch.ops.aten.range.step(*numbers, **{**kwargs, "device": torch.device(device)})
        return made.requires_grad_() if requires_grad else made

    return call


def _sparse(factory: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        device = torch.device(kwargs.get("device") or _default_device())
        given = dict(zip(("indices", "values"), args, strict=False)) | kwargs
        if device.type != "cuda" or "values" not in given:
            return factory(*args, **kwargs)
        # In C++ both are copied to the device out of sight of any dispatch mode, values first.
        dtype, size = given.pop("dtype", None), args[2:]
        values = torch.as_tensor(given.pop("values"), dtype=dtype, device=device)
        indices = torch.as_tensor(given.pop("indices"), dtype=torch.int64, device=device)
        given.pop("device", None)
        with torch._C.DisableTorchFunction():
            return factory(indices, values, *size, **given)

    return call


_UNSEEN = {"asarray": _from_arrays, "range": _range, "tensor": _from_arrays}
"""What C++ does on a device before a dispatch mode can see it: how to call the factory."""


def _default_device() -> torch.device:
    # torch.get_default_device of 2.6 does not see contexts, and raises once the default was reset.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return torch.device("cpu")


def _check_generator(generator: torch.Generator, device: Any) -> None:
    target = _default_device() if device is None else torch.device(device)
    if target.type in ("cpu", "cuda") and generator.device.type != target.type:
        raise RuntimeError(
            f"Expected a '{target.type}' device type for generator but found "
            f"'{generator.device.type}'"
        )


def _watching(
    simulation: Simulation, factory: Callable[..., Any], replaced: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(replaced)
    def call(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _numbered(kwargs["device"])
        if kwargs.get("generator") is not None and not isinstance(args[0], torch.Tensor):
            _check_generator(kwargs["generator"], kwargs.get("device"))
        # Meta kernels written in Python make their outputs on meta too.
        if _is_meta(kwargs.get("device")) and not simulation.execution.inside_here:
            return _asked_for_meta(simulation, factory, args, kwargs)
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
        if (
            _is_meta(context.device)
            and not (kwargs or {}).get("device")
            and func in _device_constructors()
        ):
            return _asked_for_meta(
                simulation, torch_function, (context, func, types, args, kwargs), {}
            )
        return torch_function(context, func, types, args, kwargs)

    return call


def _asked_for_meta(
    simulation: Simulation,
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with simulation.making(META):
        return factory(*args, **kwargs)


def _as_tensor(as_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def call(data: Any, dtype: Any = None, device: Any = None) -> Any:
        # In C++ as_tensor copies to the device out of sight of any dispatch mode.
        device = _numbered(device)
        if device is None or torch.device(device).type != "cuda":
            return as_tensor(data, dtype=dtype, device=device)
        if isinstance(data, torch.Tensor):
            return data.to(device, dtype)
        return as_tensor(data, dtype=dtype, device="cpu").to(device)

    return call
