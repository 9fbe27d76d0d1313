"""``torch.Tensor``: device, moves between devices, and reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.frames import let_go
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.surface.tensor_moves import TensorMoves
from pytest_gpumem.simulated.surface.tensor_reads import TensorReads

_LAZY: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]


class _Tensors(TensorMoves, TensorReads):
    """All replacements of tensors."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace properties of tensors, and how they move."""
    surface = _Tensors(machine)
    tensor = torch.Tensor
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        own: Any = vars(torch._C.TensorBase)[name]
        patches.add(tensor, name, property(getattr(surface, name), own.__set__, own.__delete__))
    for name in (
        *("to", "cuda", "cpu", "get_device", "data_ptr", "type", "type_as", "numpy", "tolist"),
        *("item", "__getitem__", "__setitem__", "__array__", "__bool__", "__deepcopy__"),
        "__repr__",
    ):
        # A plain function binds to the tensor; a bound method would not.
        method = getattr(surface, name.strip("_"))
        patches.add(tensor, name, _as_function(method, getattr(tensor, name)))
    patches.add(tensor, "__new__", staticmethod(_new))
    address = torch.UntypedStorage.data_ptr
    patches.add(torch.UntypedStorage, "data_ptr", _as_function(surface.storage_data_ptr, address))


def _new(kind: type, /, *args: Any, **kwargs: Any) -> Any:
    # C++ gives its results their class, but the results of a mode have one already.
    made = torch._C.TensorBase.__new__(torch.Tensor, *args, **kwargs)
    return made if type(made) is kind else made.as_subclass(kind)


def _as_function(method: Any, replaced: Any) -> Any:
    """Return ``method`` as a function that takes the place of ``replaced``."""

    def call(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if tensor.__class__ not in raw.PLAIN and has_torch_function_unary(tensor):
            if is_lazy(tensor):
                return _of_lazy(method, replaced, tensor, args, kwargs)
            # A subclass of the user's own, which may keep its type or do something else.
            return handle_torch_function(call, (tensor,), tensor, *args, **kwargs)
        try:
            return method(tensor, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            let_go(error.__traceback__)
            del tensor, args, kwargs
            raise

    return call


def _of_lazy(method: Any, replaced: Any, tensor: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run ``method`` of a lazy module's parameter or buffer, which compares functions by identity.

    Allowed methods run as torch runs them: a buffer stays one, or it could not take its shape
    later. The rest raises torch's error. Source: torch/nn/parameter.py (UninitializedTensorMixin),
    torch 2.6 to 2.15.
    """
    if replaced not in tensor._allowed_methods:
        return handle_torch_function(replaced, (tensor,), tensor, *args, **kwargs)
    kind = type(tensor)
    run = super(_LAZY, kind).__torch_function__
    return run(method, (kind,), (tensor, *args), kwargs)
