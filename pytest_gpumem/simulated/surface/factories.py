"""Factory functions: a tensor requested on ``meta`` by name holds no CUDA memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_FACTORIES = (
    *("arange", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like"),
    *("empty_permuted", "empty_strided", "eye", "full", "full_like", "hamming_window"),
    *("hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range"),
    *("scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    "zeros_like",
)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Watch for ``device="meta"``, which otherwise stands for CUDA inside a simulation."""
    _device_constructors()  # torch caches this set of functions: it must hold the real ones.
    for name in _FACTORIES:
        factory = getattr(torch, name)
        seen = partial(_UNSEEN[name], factory) if name in _UNSEEN else factory
        patches.add(torch, name, _watching(machine, seen, factory))
    for name in ("fftfreq", "rfftfreq"):
        factory = getattr(torch.fft, name)
        patches.add(torch.fft, name, _watching(machine, factory, factory))
    for name in _NEW:
        patches.wrap(torch.Tensor, name, partial(_new, machine))
    as_tensor = torch.as_tensor
    patches.wrap(torch, "as_tensor", partial(_as_tensor, machine))
    through = partial(_context, machine, as_tensor)
    patches.wrap(DeviceContext, "__torch_function__", through)
    patches.wrap(torch._C._nn, "_parse_to", _parse_to)


def _parse_to(parse_to: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (_numbered(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = _numbered(kwargs["device"])
    device, *others = parse_to(*args, **kwargs)
    like = args[0] if args else kwargs.get("tensor")
    if isinstance(like, torch.Tensor):
        device = like.device  # C++ sees meta
    return device, *others


def _is_meta(device: Any) -> bool:
    return device == "meta" or (isinstance(device, torch.device) and device.type == "meta")


def _numbered(device: Any) -> Any:
    # A build without CUDA cannot map that number to a device.
    return torch.device("cuda", device) if type(device) is int else device


def _new(machine: SimulatedMachine, new: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = _numbered(kwargs["device"])
        if _is_meta(kwargs["device"]) and not machine.execution.inside_here:
            return asked_for_meta(machine, new, args, kwargs)
    return new(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A call without a device is left to torch to refuse.
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _from_arrays(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if kwargs.get("pin_memory") and not _is_cuda(device):
        # In C++ the pinned memory is allocated where no dispatch mode sees it.
        requires_grad = kwargs.get("requires_grad", False)
        plain = {**kwargs, "pin_memory": False, "requires_grad": False}
        made = _from_arrays(factory, *args, **plain).pin_memory()
        return made.requires_grad_() if requires_grad else made
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    numbers = numbers_in(data, kwargs.get("dtype"))
    if numbers is not None:
        return factory(numbers[0], *args[1:], **_without_data(kwargs), dtype=numbers[1])
    if not _is_cuda(device):
        return factory(*args, **kwargs)
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if isinstance(mode, FakeTensorMode):  # of the user's own, in place of the simulation
        # It keeps the values of constants, and would copy them to a real device.
        made = factory(*args, **{**kwargs, "device": "cpu"})
        made.constant = None
        return made.to(device)
    if not hasattr(data, "__array__") or isinstance(data, torch.Tensor):
        return factory(*args, **kwargs)
    # In C++ an array is copied to the device where no dispatch mode sees it.
    requires_grad = kwargs.pop("requires_grad", False)
    made = factory(*args, **{**kwargs, "device": "cpu"}).to(device)
    return made.requires_grad_() if requires_grad else made


def _without_data(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("data", "obj", "dtype")}


def _range(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device: Any = kwargs.get("device")
    if not _is_cuda(device):
        return factory(*args, **kwargs)
    # In C++ it looks for the device before any dispatch mode sees the operator.
    requires_grad = kwargs.pop("requires_grad", False)
    named = (kwargs.pop(name, None) for name in ("start", "end", "step"))
    numbers = [*args, *(number for number in named if number is not None)]
    made = torch.ops.aten.range.step(*numbers, **{**kwargs, "device": torch.device(device)})
    return made.requires_grad_() if requires_grad else made


def _sparse(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device") or _default_device()
    given = dict(zip(("indices", "values"), args, strict=False)) | kwargs
    if not _is_cuda(device) or "values" not in given:
        return factory(*args, **kwargs)
    # In C++ both are copied to the device where no dispatch mode sees it, values first.
    dtype = given.pop("dtype", None)
    values = torch.as_tensor(given.pop("values"), dtype=dtype, device=device)
    indices = torch.as_tensor(given.pop("indices"), dtype=torch.int64, device=device)
    given.pop("device", None)
    with torch._C.DisableTorchFunction():
        return factory(indices, values, *args[2:], **given)


_UNSEEN: dict[str, Callable[..., Any]] = {
    "asarray": _from_arrays,
    "range": _range,
    "sparse_coo_tensor": _sparse,
    "tensor": _from_arrays,
}
"""Factories whose C++ code uses a device before a dispatch mode sees it: how to call them."""


def _default_device() -> torch.device:
    # torch.get_default_device of 2.6 does not see contexts, and raises once the default was reset.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return torch.device("cpu")


def _check_generator(generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise torch's error for a generator of another device: all of them are the CPU's here.

    Source: aten/src/ATen/core/Generator.h (check_generator), torch 2.6 to 2.15.
    """
    if not isinstance(generator, torch.Generator):
        return
    target = _target(args, kwargs).type
    if target in ("cpu", "cuda") and generator.device.type != target:
        raise RuntimeError(
            f"Expected a '{target}' device type for generator but found '{generator.device.type}'"
        )


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which a factory called with ``args`` and ``kwargs`` makes its result."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for value in (kwargs.get("out"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return _default_device()


def _watching(
    machine: SimulatedMachine, factory: Callable[..., Any], replaced: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(replaced)
    def call(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _numbered(kwargs["device"])
        elif machine.current_index and str(kwargs.get("device")) == "cuda":
            # torch.tensor() takes "cuda" for the first GPU, before a dispatch mode can see it.
            kwargs["device"] = machine.current.torch_device
        if kwargs.get("generator") is not None:
            _check_generator(kwargs["generator"], args, kwargs)
        # Meta kernels written in Python make their outputs on meta too.
        if _is_meta(kwargs.get("device")) and not machine.execution.inside_here:
            return asked_for_meta(machine, factory, args, kwargs)
        return factory(*args, **kwargs)

    return call


def _context(
    machine: SimulatedMachine,
    as_tensor: Callable[..., Any],
    torch_function: Callable[..., Any],
    context: Any,
    func: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    given = kwargs or {}
    if given.get("device"):
        return torch_function(context, func, types, args, given)
    if func is as_tensor:
        return _as_tensor(machine, as_tensor, *args, **{**given, "device": context.device})
    if func in _device_constructors():
        if _is_meta(context.device):
            arguments = context, func, types, args, given
            return asked_for_meta(machine, torch_function, arguments, {})
        if machine.current_index and str(context.device) == "cuda":
            given = {**given, "device": machine.current.torch_device}
    return torch_function(context, func, types, args, given)


def asked_for_meta(
    machine: SimulatedMachine,
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``factory``, whose ``meta`` tensors are real ones and hold no CUDA memory."""
    with machine.making(raw.META):
        return factory(*args, **kwargs)


def _as_tensor(
    machine: SimulatedMachine, as_tensor: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # In C++ as_tensor copies to the device where no dispatch mode sees it.
    device = _numbered(kwargs.get("device"))
    data, dtype = args[0] if args else kwargs.get("data"), kwargs.get("dtype")
    numbers = numbers_in(data, dtype)
    if numbers is not None:
        args, kwargs = numbers[:1], {**_without_data(kwargs), "dtype": numbers[1]}
    if _is_meta(device):
        return asked_for_meta(machine, as_tensor, args, kwargs)
    if not _is_cuda(device):
        return as_tensor(*args, **kwargs)
    data, dtype = args[0] if args else kwargs["data"], kwargs.get("dtype")
    if isinstance(data, torch.Tensor):
        return data.to(device, dtype)
    return as_tensor(data, dtype=dtype, device="cpu").to(device)


# Tensors in nested lists: ``torch.tensor([loss, other])``. For Python's C interface a tensor is no
# sequence, by which torch sees that a tensor without dimensions is a number there. A class whose
# ``__getitem__`` is replaced becomes one, and stays one.

_is_sequence = ctypes.pythonapi.PySequence_Check
_is_sequence.argtypes = [ctypes.py_object]
_is_sequence.restype = ctypes.c_int

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = object.__basicsize__ + 11 * _POINTER
"""Offset of ``tp_as_sequence`` in a type: ten fields after its size (Include/cpython)."""
_ITEM = 3 * _POINTER
"""Offset of ``sq_item`` among the functions there."""


def is_sequence(tensor: torch.Tensor) -> bool:
    """Return whether C code treats ``tensor`` as a sequence."""
    return bool(_is_sequence(tensor))


def stop_being_sequences() -> None:
    """Stop C code from treating tensors as sequences once ``Tensor.__getitem__`` was replaced."""
    if is_sequence(_NUMBER):
        for kind in _without_own_items(torch.Tensor):
            functions = ctypes.c_void_p.from_address(id(kind) + _AS_SEQUENCE).value
            assert functions is not None
            ctypes.c_void_p.from_address(functions + _ITEM).value = None


def _without_own_items(kind: type) -> Iterator[type]:
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for derived in found:
        if "__getitem__" not in vars(derived):
            yield from _without_own_items(derived)


_NUMBER = torch.empty((), device="cpu")


def numbers_in(data: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype | None] | None:
    """Return ``data``, a nested list, with numbers for its CUDA tensors, and the type of all.

    ``None`` if it has none. Each is read by ``item()``; C++ would read it unseen.
    Source: torch/csrc/utils/tensor_new.cpp (infer_scalar_type, recursive_store).
    """
    if not isinstance(data, (list, tuple)) or not _has_gpu_tensors(data):
        return None
    if dtype is None:
        leaves = (
            leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf) for leaf in _leaves(data)
        )
        types = [leaf.dtype for leaf in leaves]
        dtype = types[0]
        for other in types[1:]:
            dtype = torch.promote_types(dtype, other)
    return _read(data), dtype


def _has_gpu_tensors(data: list[Any] | tuple[Any, ...]) -> bool:
    # Most lists hold only numbers, perhaps millions of them.
    kinds = set(map(type, data))
    if any(issubclass(kind, torch.Tensor) for kind in kinds) and any(map(_is_on_gpu, data)):
        return True
    nested = any(issubclass(kind, (list, tuple)) for kind in kinds)
    return nested and any(
        _has_gpu_tensors(part) for part in data if isinstance(part, (list, tuple))
    )


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _leaves(item)
    else:
        yield data


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and raw.is_meta(value) and value.is_cuda


def _read(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_read(item) for item in data]
    if not _is_on_gpu(data):
        return data
    return data.tolist() if data.dim() else data.item()
