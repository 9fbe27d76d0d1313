"""``torch.cuda.FloatTensor`` and its relatives, ``Tensor.new``, ``set_default_tensor_type``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.jit._builtins
import torch.jit.annotations
from torch.jit._script import RecursiveScriptModule

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.surface.factories import asked_for_meta

DTYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.int16: "ShortTensor",
    torch.int8: "CharTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make the types of CUDA tensors usable on a build without CUDA."""
    for dtype, name in DTYPE_NAMES.items():
        kind = _CudaType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        patches.add(torch.cuda, name, kind)
    for name, made in (("new", _new), ("new_tensor", new_tensor)):
        patches.wrap(torch.Tensor, name, functools.partial(_make, machine, made))
    patches.wrap(torch, "set_default_tensor_type", _set_default)
    # Scripted modules are moved and loaded in Python, where C++ would need a device.
    patches.add(RecursiveScriptModule, "_apply", _apply)
    patches.wrap(torch.jit, "load", _load)
    # TorchScript finds the operator of a function of torch's by the function's identity.
    builtins = dict(torch.jit._builtins._get_builtin_table())
    for _, _, value in patches.added:
        operator = builtins.get(id(getattr(value, "__wrapped__", None)))
        if operator is not None:
            builtins[id(value)] = operator
    patches.add(torch.jit._builtins, "_builtin_table", builtins)
    patches.wrap(torch.jit.annotations, "try_ann_to_type", _annotated)


class _CudaType(type):
    """The type of the classes: calling one makes a tensor, ``isinstance`` checks one."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        return _legacy(args, cls.dtype, "cuda" if device is None else device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype


def _legacy(args: tuple[Any, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Build a tensor as the old constructors do: uninitialised from sizes, else from data.

    Source: torch/csrc/utils/tensor_new.cpp (legacy_tensor_generic_ctor_new).
    """
    if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
        data = args[0]
        if not isinstance(data, torch.Tensor):
            return torch.tensor(data, dtype=dtype, device=device)
        expected = torch.device(device).type
        if data.dtype is not dtype or data.device.type != expected:
            raise TypeError(f"expected {DTYPE_NAMES[dtype]} on {expected} (got {data.type()})")
        return data.detach()
    size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
    return torch.empty(size, dtype=dtype, device=device)


def _make(
    machine: SimulatedMachine,
    made: Callable[..., Any],
    on_cpu: Callable[..., Any],
    tensor: torch.Tensor,
    /,
    *args: Any,
    **options: Any,
) -> Any:
    """Call ``made`` where a GPU takes part, else ``on_cpu``."""
    device = options.get("device")
    if tensor.is_meta and device is None:
        return asked_for_meta(machine, on_cpu, (tensor, *args), options)
    on_gpu = tensor.is_cuda or not (device is None or str(device).partition(":")[0] == "cpu")
    return (made if on_gpu else on_cpu)(tensor, *args, **options)


def _new(tensor: torch.Tensor, *args: Any, device: Any = None) -> torch.Tensor:
    device = tensor.device if device is None else device
    if tensor.layout is not torch.sparse_coo:
        return _legacy(args, tensor.dtype, device)
    # Indices, values and perhaps a size (legacy_sparse_tensor_generic_ctor_new), or only a size.
    if args and isinstance(args[0], torch.Tensor):
        # Passed explicitly, to avoid a warning that the old constructors do not give.
        checks = torch.sparse.check_sparse_tensor_invariants.is_enabled()
        return torch.sparse_coo_tensor(*args, device=device, check_invariants=checks)
    size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
    return torch.empty(size, dtype=tensor.dtype, layout=tensor.layout, device=device)


def new_tensor(
    tensor: torch.Tensor,
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Run ``Tensor.new_tensor``, for which C++ would look up the type of tensors of this device."""
    return torch.tensor(
        data,
        dtype=tensor.dtype if dtype is None else dtype,
        device=tensor.device if device is None else device,
        requires_grad=requires_grad,
        **options,
    )


def _set_default(set_type: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    kind = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
    else:
        module, name = (getattr(kind, part, "") for part in ("__module__", "__name__"))
    if module != "torch.cuda":
        set_type(*args, **kwargs)
        torch.set_default_device(None)
        return
    dtype = next((each for each, found in DTYPE_NAMES.items() if found == name), torch.bool)
    if not dtype.is_floating_point:
        raise TypeError(f"only floating-point types are supported as the default type: {kind}")
    torch.set_default_dtype(dtype)
    torch.set_default_device("cuda")


def _apply(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Run ``Module._apply`` on a scripted module: its tensors are in C++ and are replaced there."""
    if recurse:
        for child in module.children():
            child._apply(function)
    with torch.no_grad():
        tensors: tuple[Any, ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, tensor in list(held.items()):
                if tensor is not None:
                    moved = function(tensor)
                    held[name] = moved.requires_grad_() if tensor.requires_grad else moved
    return module


def _annotated(convert: Callable[..., Any], annotation: Any, *args: Any) -> Any:
    # Code that was imported earlier is annotated with the class that is replaced.
    is_device = isinstance(annotation, type) and annotation == torch.device
    return convert(torch.device if is_device else annotation, *args)


def _load(
    load: Callable[..., Any], file: Any, map_location: Any = None, *args: Any, **options: Any
) -> Any:
    if map_location is None or torch.device(map_location).type != "cuda":
        return load(file, map_location, *args, **options)
    return load(file, "cpu", *args, **options).to(map_location)
