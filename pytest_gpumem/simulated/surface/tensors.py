"""``torch.Tensor``: reads, moves between host and GPUs, and ``tensor.data = other``.

``tensor.data = other`` across devices keeps the tensor, with its gradient and its graph. torch
allows that between CPU and CUDA, but not between CPU and ``meta``. It asks its dispatcher first,
which answers here as for a GPU; the copying is then the same.

Source: torch/csrc/autograd/variable.cpp (VariableHooks::set_data), c10/core/TensorImpl.h
(has_compatible_shallow_copy_type, shallow_copy_from), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import parameter

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import Method, Patches
from pytest_gpumem.simulated.machine.checks import NO_DATA
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.placement import return_gradient
from pytest_gpumem.simulated.surface.legacy import DTYPE_NAMES
from pytest_gpumem.simulated.surface.tensor_reads import TensorReads
from pytest_gpumem.simulated.surface.wrappers import is_wrapper

_to: Callable[..., torch.Tensor] = raw.base("to")
_type = raw.base("type")
_Lazy: Any = vars(parameter)["UninitializedTensorMixin"]
_lazy_shape: Callable[[torch.Tensor], torch.Size] = _Lazy.shape.fget


class Tensors(TensorReads):
    """Reads of a tensor, ``to`` and other methods that move it."""

    def to(self, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._machine.execution.inside_here:
            return _to(tensor, *args, **kwargs)
        position = 0 if args else None
        target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if isinstance(target, torch.Tensor):
            # C++ would find the other tensor on meta.
            kwargs.pop("tensor", None)
            return self.to(tensor, target.device, target.dtype, *args[1:], **kwargs)
        if not isinstance(target, (torch.device, str, int)):
            return _to(tensor, *args, **kwargs)
        device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
        if device.type == "cuda":
            self._machine.device(device.index)
        elif not raw.is_meta(tensor) and device.type != "meta":
            return _to(tensor, *args, **kwargs)
        if is_wrapper(tensor):
            return self._wrapper_to(tensor, device, args, kwargs)
        block = self._block(tensor)
        is_sparse = tensor.layout is torch.sparse_coo and not raw.is_meta(tensor)
        if device.type == "cuda" and is_sparse and not tensor.requires_grad:
            return _uploaded(tensor, device, args, kwargs)
        if device.type != "meta" and self.device(tensor).type == "meta":
            raise NotImplementedError(NO_DATA)
        if device.type == "cpu":
            copied = _to(tensor, *args, **kwargs)
            if block is not None and self._machine.placement is not None:
                return_gradient(copied, block.device)
            return copied
        stays = device.type == "cuda" and self._machine.device(device.index)
        leaves = block is not None and block.device is not stays
        if leaves or self.device(tensor).type != device.type:
            # To torch both ends may be meta, and it would return the same tensor.
            kwargs = {**kwargs, "copy": True}
        with self._machine.making(device):
            if position is None:
                moved = _to(tensor, **{**kwargs, "device": "meta"})
            else:
                moved = _to(tensor, "meta", *args[1:], **kwargs)
        if leaves and block is not None and device.type == "cuda":
            return_gradient(moved, block.device)
        return moved

    def _wrapper_to(
        self, tensor: torch.Tensor, device: torch.device, args: tuple[Any, ...], kwargs: Any
    ) -> torch.Tensor:
        """Move a wrapper's tensors, with the device that the caller named."""
        if device.type == "cuda":
            device = self._machine.device(device.index).torch_device
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if self.device(tensor) == device:
            # The device is left out, so the type is first: None stands for this tensor's own.
            first = [tensor.dtype if one is None else one for one in args[1:2]]
            return _to(tensor, *first, *args[2:], **kwargs)
        return _to(tensor, device, *args[1:], **kwargs)

    def cpu(
        self, tensor: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format
    ) -> torch.Tensor:
        return self.to(tensor, "cpu", memory_format=memory_format)

    def cuda(
        self,
        tensor: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        target = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        if torch.device(target).type != "cuda":
            raise RuntimeError("Invalid device, must be cuda device")
        return self.to(tensor, target, non_blocking=non_blocking, memory_format=memory_format)

    def type(
        self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        if dtype is None:
            if self._block(tensor) is None:
                return _type(tensor)
            return f"torch.cuda.{DTYPE_NAMES.get(tensor.dtype, 'Tensor')}"
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        for kind, suffix in DTYPE_NAMES.items():
            if name.endswith(suffix) and "cuda" in f"{name}{getattr(dtype, '__module__', '')}":
                return self.to(tensor, "cuda", kind)
        return _type(tensor, dtype, non_blocking, **kwargs)

    def type_as(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        # C++ would find the other tensor on meta, without the GPU.
        return tensor.to(other)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace properties of tensors, and how they move."""
    surface = Tensors(machine)
    tensor = torch.Tensor
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        own: Any = vars(torch._C.TensorBase)[name]
        patches.add(tensor, name, property(getattr(surface, name), own.__set__, own.__delete__))
    for name in (
        *("to", "cuda", "cpu", "get_device", "data_ptr", "type", "type_as", "numpy", "tolist"),
        *("item", "__getitem__", "__setitem__", "__array__", "__bool__"),
        "__repr__",
    ):
        function = getattr(surface, name.strip("_"))
        patches.add(tensor, name, Method(function, getattr(tensor, name)))
    patches.add(tensor, "__new__", staticmethod(_new))
    patches.wrap(torch.UntypedStorage, "data_ptr", surface.storage_data_ptr)
    patches.add(_Lazy, "shape", property(_shape_of_lazy))


def _shape_of_lazy(tensor: torch.Tensor) -> torch.Size:
    # Inside operators, where C++ reads sizes, __torch_function__ of subclasses is disabled.
    if torch._C._is_torch_function_enabled():
        return _lazy_shape(tensor)
    return tensor.size()


def _new(kind: type, /, *args: Any, **kwargs: Any) -> Any:
    # C++ casts its results to their class, but those of a mode have a class already.
    made = torch._C.TensorBase.__new__(torch.Tensor, *args, **kwargs)
    return made if type(made) is kind else made.as_subclass(kind)


def _uploaded(
    tensor: torch.Tensor, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return a copy of a sparse tensor on ``device``: shapes do not show its number of elements.

    Source: aten/src/ATen/native/sparse/SparseTensor.cpp (copy_sparse_), ATen/SparseTensorUtils.h
    (copy_into_sparse).
    """
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None)
    copied = torch.sparse_coo_tensor(
        tensor._indices().to(device),
        tensor._values(),
        tensor.shape,
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        device=device,
    )
    return copied._coalesced_(tensor.is_coalesced())


_QUESTION = "_has_compatible_shallow_copy_type"
_CPU = torch._C.DispatchKey.CPU


@contextmanager
def answering(machine: SimulatedMachine) -> Iterator[None]:
    """Install that answer inside: above autograd, and in the execution for inference mode."""
    device = TensorReads(machine).device

    def may_take_place(one: torch.Tensor, other: torch.Tensor) -> bool:
        types = {device(one).type, device(other).type}
        dense = one.layout is other.layout is torch.strided
        if len(types) > 1:
            return dense and types == {"cpu", "cuda"}
        keys, others = (torch._C._dispatch_keys(tensor) for tensor in (one, other))
        on_cpu = keys.has(_CPU) and others.has(_CPU)
        return keys.raw_repr() == others.raw_repr() or (dense and on_cpu)

    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradMeta"):
        library.impl(_QUESTION, may_take_place, key)
    operator = getattr(torch.ops.aten, _QUESTION).default
    machine.execution.bind(operator, lambda args, _: may_take_place(*args))
    try:
        yield
    finally:
        library._destroy()
