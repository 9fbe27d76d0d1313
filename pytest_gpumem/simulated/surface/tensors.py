"""``torch.Tensor``: device, moves between devices, and reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnknownValueError, UnsupportedOperatorError
from pytest_gpumem.simulated.machine.checks.devices import NO_DATA
from pytest_gpumem.simulated.machine.placement import return_gradient
from pytest_gpumem.simulated.machine.values.assumptions import taken_for_granted
from pytest_gpumem.simulated.machine.values.neutral import NeutralFloat, NeutralInt
from pytest_gpumem.simulated.operators import transfers
from pytest_gpumem.simulated.surface.factories import asked_for_meta
from pytest_gpumem.simulated.surface.legacy import DTYPE_NAMES
from pytest_gpumem.simulated.surface.several import brought
from pytest_gpumem.simulated.surface.wrappers import is_wrapper, place_of

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.machine.storages import SimulatedStorage
    from pytest_gpumem.simulated.simulation import Simulation


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace what a tensor says of itself, and how it moves."""
    surface = _Tensors(simulation)
    tensor = torch.Tensor
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        patches.plan(tensor, name, _attribute(name, getattr(surface, name)))
    patches.plan(tensor, "data", _attribute("data", surface.get_data, surface.set_data))
    for name, method in {
        "to": surface.to,
        "cuda": surface.cuda,
        "cpu": surface.cpu,
        "get_device": surface.get_device,
        "data_ptr": surface.data_ptr,
        "type": surface.type,
        "numpy": surface.numpy,
        "tolist": surface.tolist,
        "item": surface.item,
        "__getitem__": surface.getitem,
        "__setitem__": surface.setitem,
        "__array__": surface.array,
        "__bool__": surface.bool,
        "__deepcopy__": surface.deepcopy,
        "__repr__": surface.repr,
    }.items():
        # A plain function binds to the tensor; a bound method would not.
        patches.plan(tensor, name, _as_function(method))
    patches.plan(tensor, "__new__", staticmethod(_new))
    patches.plan(torch, "_has_compatible_shallow_copy_type", surface.shallow_copies)
    patches.plan(torch.UntypedStorage, "data_ptr", _as_function(surface.storage_data_ptr))


def _attribute(name: str, get: Callable[..., Any], write: Any = None) -> property:
    own: Any = vars(torch._C.TensorBase)[name]
    return property(get, write or own.__set__, own.__delete__)


def _new(kind: type, /, *args: Any, **kwargs: Any) -> Any:
    # C++ gives what it has made its class, but the results of a mode have one already.
    made = torch._C.TensorBase.__new__(torch.Tensor, *args, **kwargs)
    return made if type(made) is kind else made.as_subclass(kind)


def _as_function(method: Any) -> Any:
    def call(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (
            tensor.__class__ not in raw.PLAIN
            and has_torch_function_unary(tensor)
            and not is_lazy(tensor)
        ):
            # A subclass of the user's own, which may keep its type or do something else.
            return handle_torch_function(call, (tensor,), tensor, *args, **kwargs)
        return method(tensor, *args, **kwargs)

    return call


_to: Callable[..., torch.Tensor] = raw.base("to")
_type = raw.base("type")
_get_device = raw.base("get_device")
_data_ptr = raw.base("data_ptr")
_bool = raw.base("__bool__")
_tolist = raw.base("tolist")
_item = raw.base("item")
_getitem = raw.base("__getitem__")
_setitem = raw.base("__setitem__")
_numpy = raw.base("numpy")


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``Tensor.to`` was told not to wait for the copy: its third argument."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _is_sparse_on_host(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.sparse_coo and not raw.is_meta(tensor) and not tensor.requires_grad
    )


def _uploaded(
    tensor: torch.Tensor, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A copy of indices and values on ``device``, where shapes alone would not say how many.

    Source: aten/src/ATen/native/sparse/SparseTensor.cpp (copy_sparse_), ATen/SparseTensorUtils.h
    (copy_into_sparse).
    """
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None)
    copied = torch.sparse_coo_tensor(
        tensor._indices(),
        tensor._values(),
        tensor.shape,
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        device=device,
    )
    return copied._coalesced_(tensor.is_coalesced())


_Truth = bool
"""``bool`` is a method below."""


class _Tensors:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._storages = simulation.storages
        self._values = simulation.values
        self._deepcopy: Any = torch.Tensor.__deepcopy__
        self._repr: Any = torch.Tensor.__repr__
        self._storage_data_ptr = torch.UntypedStorage.data_ptr
        self._shallow_copies = torch._has_compatible_shallow_copy_type
        self._array: Any = torch.Tensor.__array__

    def _block(self, tensor: torch.Tensor) -> SimulatedStorage | None:
        if not raw.is_meta(tensor) or self._simulation.execution.inside_here:
            return None
        return self._storages.of(tensor)

    # What a tensor says of itself.

    def device(self, tensor: torch.Tensor) -> torch.device:
        if not raw.is_meta(tensor) or self._simulation.execution.inside_here:
            return raw.device(tensor)
        block = self._storages.of(tensor)
        if block is not None:
            return block.device.torch_device
        return place_of(tensor) or raw.device(tensor)

    def is_cuda(self, tensor: torch.Tensor) -> bool:
        if self._block(tensor) is not None:
            return True
        # A wrapper: it has no storage.
        return tensor.__class__ not in raw.PLAIN and self.device(tensor).type == "cuda"

    def is_cpu(self, tensor: torch.Tensor) -> bool:
        return self.device(tensor).type == "cpu"

    def is_meta(self, tensor: torch.Tensor) -> bool:
        return self.device(tensor).type == "meta"

    def get_device(self, tensor: torch.Tensor) -> int:
        block = self._block(tensor)
        return int(_get_device(tensor)) if block is None else block.device.index

    def data_ptr(self, tensor: torch.Tensor) -> int:
        block = self._block(tensor)
        if block is None:
            self._refuse_on_host(tensor, "data_ptr()")
            return int(_data_ptr(tensor))
        return block.address + int(tensor.storage_offset()) * tensor.element_size()

    def storage_data_ptr(self, storage: torch.UntypedStorage) -> int:
        block = self._storages.by_key.get(storage._cdata)
        if block is not None:
            return block.address
        if storage._cdata in self._storages.on_host:
            # There is nothing to be read there: safetensors and ctypes would take it for empty.
            raise UnknownValueError(self._unknown("data_ptr()"))
        return self._storage_data_ptr(storage)

    def repr(self, tensor: torch.Tensor, **kwargs: Any) -> str:
        device = self.device(tensor)
        is_real = not raw.is_meta(tensor) and not self._storages.is_on_host(tensor)
        if is_real or device.type == "meta":
            return str(self._repr(tensor, **kwargs))
        known = self._known(tensor)
        if known is not None:
            return str(self._repr(tensor, **{"tensor_contents": _contents(known), **kwargs}))
        grad = (
            f", grad_fn=<{type(tensor.grad_fn).__name__}>"
            if tensor.grad_fn is not None
            else ", requires_grad=True"
            if tensor.requires_grad
            else ""
        )
        return (
            f"tensor(..., device='{device}', size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype}{grad})"
        )

    # Moves.

    def to(self, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._simulation.execution.inside_here:
            return _to(tensor, *args, **kwargs)
        position = 0 if args else None
        target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if isinstance(target, torch.Tensor):
            # In C++ the other tensor would only say meta.
            kwargs.pop("tensor", None)
            return self.to(tensor, target.device, target.dtype, *args[1:], **kwargs)
        if not isinstance(target, (torch.device, str, int)):
            return _to(tensor, *args, **kwargs)
        device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
        if device.type == "cuda":
            self._simulation.device(device.index)
        elif not raw.is_meta(tensor) and device.type != "meta":
            return _to(tensor, *args, **kwargs)
        if is_wrapper(tensor):
            return self._wrapper_to(tensor, device, args, kwargs)
        block = self._block(tensor)
        if block is not None and is_lazy(tensor) and device.type == "cpu":
            raise UnsupportedOperatorError(
                f"a lazy module moves back to the host at {user_line()} before it has a shape, "
                f"which it cannot on a simulated GPU: run it once first"
            )
        if device.type == "cuda" and _is_sparse_on_host(tensor):
            return _uploaded(tensor, device, args, kwargs)
        if device.type != "meta" and self.device(tensor).type == "meta":
            raise NotImplementedError(NO_DATA)
        if self._crosses(block, device) and not _is_non_blocking(args, kwargs):
            index = device.index if block is None else block.device.index
            self._simulation.streams.host_waits(self._simulation.device(index).index)
        if device.type == "cpu":
            copied = _to(tensor, *args, **kwargs)
            if block is not None and self._simulation.placement is not None:
                return_gradient(copied, block.device)
            return copied
        leaves = block is not None and not self._is_on(block, device)
        if leaves or self.device(tensor).type != device.type:
            # Both ends may be meta to torch, which would then hand back the same tensor.
            kwargs = {**kwargs, "copy": True}
        with self._simulation.making(device):
            if position is None:
                moved = _to(tensor, **{**kwargs, "device": "meta"})
            else:
                moved = _to(tensor, "meta", *args[1:], **kwargs)
        if leaves and block is not None and device.type == "cuda":
            return_gradient(moved, block.device)
        return moved

    def _crosses(self, block: SimulatedStorage | None, device: torch.device) -> _Truth:
        """Whether a copy to ``device`` is one between the host and a GPU."""
        return device.type != "meta" and (block is None) != (device.type == "cpu")

    def _wrapper_to(
        self, tensor: torch.Tensor, device: torch.device, args: tuple[Any, ...], kwargs: Any
    ) -> torch.Tensor:
        """Let a wrapper move what it holds: it is told the device that it was asked for."""
        if device.type == "cuda":
            device = self._simulation.device(device.index).torch_device
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if self.device(tensor) == device:
            return _to(tensor, *[one for one in args[1:2] if one is not None], *args[2:], **kwargs)
        return _to(tensor, device, *args[1:], **kwargs)

    def _is_on(self, block: SimulatedStorage, device: torch.device) -> bool:
        return device.type == "cuda" and block.device is self._simulation.device(device.index)

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
            block = self._block(tensor)
            if block is None:
                return _type(tensor)
            return f"torch.cuda.{DTYPE_NAMES.get(tensor.dtype, 'Tensor')}"
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        for kind, suffix in DTYPE_NAMES.items():
            if name.endswith(suffix) and "cuda" in f"{name}{getattr(dtype, '__module__', '')}":
                return self.to(tensor, "cuda", kind)
        return _type(tensor, dtype, non_blocking, **kwargs)

    def shallow_copies(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether one tensor may take the other's place: CPU and CUDA may, meta may not.

        Source: c10/core/TensorImpl.h (has_compatible_shallow_copy_type), torch 2.6 to 2.15.
        """
        types = {self.device(one).type, self.device(other).type}
        if types == {"cpu", "cuda"}:
            return True
        return len(types) == 1 and bool(self._shallow_copies(one, other))

    def get_data(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, raw.data.__get__(tensor))

    def set_data(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(new, torch.Tensor) and self.is_meta(tensor) != self.is_meta(new):
            # torch/csrc/autograd/variable.cpp, VariableHooks::set_data.
            raise RuntimeError(
                "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have "
                "incompatible tensor type."
            )
        moves = isinstance(new, torch.Tensor) and raw.is_meta(tensor) != raw.is_meta(new)
        if not moves or self._block(tensor if raw.is_meta(tensor) else new) is None:
            raw.data.__set__(tensor, new)
            return
        # CPU <-> CUDA in place: the Python object stays, so optimizers and tied weights keep
        # seeing it. torch refuses this between CPU and meta, hence the swap one level lower.
        gradient = tensor.grad
        with torch.no_grad():
            replacement = new.detach()
            replacement.requires_grad_(tensor.requires_grad)
            if gradient is not None:
                tensor.grad = None
                self.set_data(gradient, gradient.to(new.device))
        try:
            torch._C._swap_tensor_impl(tensor, replacement)
        except RuntimeError as error:  # a profiler that records shapes or memory looks at it
            raise UnsupportedOperatorError(
                f"a tensor was moved at {user_line()} while a profiler watched it, which a "
                f"simulated GPU cannot do: move the model before the profiler starts"
            ) from error
        if gradient is not None:
            tensor.grad = gradient

    def deepcopy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        unknown = self._storages.is_on_host(tensor)
        if (self._block(tensor) is None and not unknown) or not tensor.is_leaf:
            return self._deepcopy(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            copied = tensor.clone()
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = self.deepcopy(tensor.grad, memo)
        copied.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = copied
        return copied

    # Reads.

    def bool(self, tensor: torch.Tensor) -> bool:
        asking = sys._getframe(2)
        if self._is_open(tensor) and (granted := taken_for_granted(asking)):
            answer, note = granted
            self._simulation.note(note)
            return answer
        known = self._known(tensor)
        if known is not None:
            return bool(_bool(known))
        self._refuse(tensor, _condition_of(asking))
        return bool(_bool(tensor))

    def getitem(self, tensor: torch.Tensor, index: Any) -> Any:
        if self._simulation.has_real_meta and self.is_meta(tensor):
            return asked_for_meta(self._simulation, _getitem, (tensor, index), {})
        return _getitem(tensor, self._as_indices(tensor, index))

    def setitem(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        if self._simulation.placement is not None:
            value = brought(self._simulation, tensor, value)
        _setitem(tensor, self._as_indices(tensor, index), value)

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
            return _neutral(tuple(tensor.shape))
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
        """Whether reading all of ``tensor`` yields neutral integers, which is then noted."""
        if not self._is_unknown(tensor) or not tensor.dim():
            return False
        block = self._block(tensor)
        if not self._simulation.reads_neutral_integers(tensor, read):
            return False
        if block is not None:
            self._simulation.streams.host_waits(block.device.index)
            transfers.stage_move(block.device, tensor, {})
        return True

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        block = self._block(tensor)
        if block is None:
            return None
        self._simulation.streams.host_waits(block.device.index)
        return self._values.known(tensor)

    def _is_unknown(self, tensor: torch.Tensor) -> _Truth:
        if self._storages.is_on_host(tensor):
            return True
        return self._block(tensor) is not None and self._values.of(tensor) is None

    def _is_open(self, tensor: torch.Tensor) -> _Truth:
        """Whether what a tensor on the device holds is unknown, or goes back to an assumption."""
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
        if self._block(tensor) is not None:
            raise UnknownValueError(self._unknown(read))

    def _refuse_on_host(self, tensor: torch.Tensor, read: str) -> None:
        if self._storages.is_on_host(tensor):
            raise UnknownValueError(self._unknown(read))

    def _unknown(self, read: str) -> str:
        return self._values.refusal(f"{read} at {user_line()} depends on")


def _condition_of(frame: FrameType) -> str:
    """Name the read of a condition, and the module of torch's that asks where the user does not."""
    module = str(frame.f_globals.get("__name__", ""))
    return f"bool() in {module}" if module.startswith("torch.") else "bool()"


def _contents(values: torch.Tensor) -> str:
    return str(torch._tensor_str._tensor_str(values, len("tensor(")))


def _neutral(shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return [NeutralInt() for _ in range(shape[0])]
    return [_neutral(shape[1:]) for _ in range(shape[0])]


def _neutral_array(shape: tuple[int, ...]) -> Any:
    """Of objects: an array of numbers could not say that they are not known."""
    import numpy as np

    array = np.empty(shape, dtype=object)
    array.fill(NeutralInt())
    return array
