"""Arguments that CUDA's kernels refuse and meta kernels accept: devices and types that differ.

Operators compare the devices of their tensors, in the order of their arguments
(ATen/core/adaption.cpp, common_device_check_failure), and many accept a scalar of the host beside
CUDA tensors (ATen/TensorIterator.cpp, compute_types; torch 2.6 to 2.15): here all do.
Meta kernels that compare no devices (``mm``, ``gather``) return uninitialised memory for a tensor
on ``meta`` beside CUDA tensors: that is refused here, too.

Products, normalizations and losses compare the types of their tensors (native/LinearAlgebra.cpp,
Loss.cpp; of native/cuda Blas.cpp, Loss.cu, MultiMarginLoss.cu, NLLLoss2d.cu, layer_norm_kernel.cu,
group_norm_kernel.cu). The types that a kernel is compiled for are not known here; on the dry device
torch's own code refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, named
from pytest_gpumem.simulated.machine.storages import Storages

NO_DATA = "Cannot copy out of meta tensor; no data!"
"""Source: aten/src/ATen/native/Copy.cpp (copy_impl), torch 2.6 to 2.15; a NotImplementedError."""

HOST_SCALAR = "number"
"""The device of a tensor that C++ made of a number, which may be used with any device."""

INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index _unsafe_index index_put index_put_ _index_put_impl_ _unsafe_index_put"
    ).split()
)
"""Operators that accept indices, masks among them."""
_ANYWHERE = (
    "aten::_foreach_copy",
    "aten::_pack_padded_sequence",
    "aten::_ctc_loss",
    "aten::ctc_loss",
    "aten::convolution",
    "aten::_efficient_attention_backward",
)
"""Operators whose tensors may be on several devices (lengths or seeds on the host, lists of several
GPUs), and convolutions, which compare them themselves (operators/convolution.py)."""


@dataclass(frozen=True)
class Placed:
    """A tensor argument and where it is: a device, or ``HOST_SCALAR``."""

    name: str
    tensor: torch.Tensor
    device: str

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number on the host."""
        return self.device == HOST_SCALAR or (self.device == "cpu" and not self.tensor.dim())


def placed(
    func: Any, args: Args, kwargs: Kwargs, place: Callable[[torch.Tensor], str]
) -> list[Placed]:
    """Return the tensors among the arguments of ``func``, in the order of its schema."""
    given = named(func, args, kwargs).items()
    return [Placed(name, each, place(each)) for name, value in given for each in tensors_in(value)]


def refuse_mixed(func: Any, tensors: Sequence[Placed]) -> None:
    """Raise an error if ``tensors``, the arguments of ``func``, are on too many devices."""
    devices = {each.device for each in tensors} - {HOST_SCALAR}
    if len(devices) < 2 or not any(device.startswith("cuda") for device in devices):
        return
    name = func._schema.name.removesuffix("_")
    indices = {each.device for each in tensors if each.name == "indices"}
    puts = "put" in name
    if name in INDEXING and not puts and indices - {"cpu", HOST_SCALAR, tensors[0].device}:
        raise RuntimeError(indices_elsewhere(tensors[0].device))
    if "meta" not in devices and name.startswith(_ANYWHERE):
        return
    # The batch sizes of a packed sequence are on the host (native/RNN.cpp, PackedLayer).
    compared = [
        each for each in tensors if each.device != HOST_SCALAR and each.name != "batch_sizes"
    ]
    if name == "aten::masked_fill":  # cuda/IndexKernel.cpp: only the value may be a number
        compared = [each for each in compared if each.name != "value" or not each.is_scalar]
    else:
        indexes = name in INDEXING
        compared = [
            each
            for each in compared
            if not (each.is_scalar or (indexes and each.name == "indices"))
        ]
    common = next(each.device for each in compared if each.device != "cpu")
    other = next((each for each in compared if each.device != common), None)
    if other is not None:
        raise RuntimeError(f"{two_devices(common, other.device)} ({other.name} of {name})")


def two_devices(one: str, other: str) -> str:
    """Return TensorIterator's error."""
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}!"
    )


def indices_elsewhere(target: str) -> str:
    """Return the error of make_info (TensorAdvancedIndexing.cpp), torch 2.6 to 2.15."""
    return f"indices should be either on cpu or on the same device as the indexed tensor ({target})"


_SAME = {
    "mm": "self mat2",
    "addmm": "self mat1 mat2",
    "_addmm_activation": "self mat1 mat2",
    "addmv": "self mat vec",
    "mv": "self vec",
    "dot": "self tensor",
    "vdot": "self other",
    "_grouped_mm": "self mat2",
    "native_layer_norm": "input weight bias",
    "native_group_norm": "input weight bias",
    "binary_cross_entropy": "self target",
    "binary_cross_entropy_backward": "grad_output self target",
    "huber_loss_backward": "grad_output self target",
    "multi_margin_loss": "self weight",
    "nll_loss_forward": "self weight",
    "nll_loss2d_forward": "self weight",
}
"""By operator: arguments whose types have to be equal, unless ``out_dtype`` is given."""


def refuse_types(func: Any, tensors: Sequence[Placed], others: Iterable[Any]) -> None:
    """Raise an error for types that differ, unless there is an ``out_dtype`` among ``others``."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    compared = _SAME.get(name, "").split()
    types = {each.name: each.tensor.dtype for each in tensors if each.name in compared}
    strided = all(each.tensor.layout is torch.strided for each in tensors)
    has_type = any(isinstance(other, torch.dtype) for other in others)
    if len(set(types.values())) > 1 and strided and not has_type:
        listed = ", ".join(f"{each} {types[each]}" for each in compared if each in types)
        raise RuntimeError(f"{name} expects tensors of the same dtype, but got {listed}")


_CASTS = ("can't be cast", "with a bool tensor")


def refuse_cast(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error where the result of ``func`` cannot be cast to the type of its target.

    Meta kernels in Python accept it (``mul_``) or word the error differently. CPU kernels use the
    same TensorIterator (ATen/TensorIterator.cpp, compute_types): one runs on an element of each.
    """
    if torch.Tag.pointwise not in func.tags or not func._schema.is_mutable:
        return
    has_complex = any(isinstance(each, complex) for each in (*args, *kwargs.values()))
    if not has_complex and all(each.is_floating_point() for each in tensors_in((args, kwargs))):
        return

    def single(tensor: torch.Tensor) -> torch.Tensor:
        if raw.is_meta(tensor):
            return raw.empty((1,) * tensor.dim(), dtype=tensor.dtype, device=raw.CPU).fill_(1)
        return tensor.clone() if tensor.dim() else tensor  # a clone is no wrapped number

    args, kwargs = tree_map_only(torch.Tensor, single, (args, dict(kwargs)))
    for each in func._schema.arguments:
        if each.is_out:
            kwargs[each.name] = kwargs[each.name].new_empty(0)  # takes any size without a warning
    try:
        func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if any(words in str(error) for words in _CASTS):
            raise


IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""Source: torch/cuda/__init__.py (_lazy_init), torch 2.6 to 2.15."""
_UNKNOWN = (
    "a forked process, such as a worker of a DataLoader, read a CPU tensor that was copied from a "
    "simulated GPU, which holds no values: read it in the process of the test (num_workers=0)"
)


def refuse_in_child(storages: Storages, args: Args, kwargs: Kwargs, target: Any) -> None:
    """Raise torch's error for an operator on a GPU in a forked process, which cannot use CUDA.

    The driver's state does not survive a fork. ``target`` is where ``Tensor.to`` moves a tensor.
    """
    device = target or kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "cuda":
        raise RuntimeError(IN_CHILD)
    for tensor in tensors_in((args, kwargs)):
        if storages.of(tensor) is not None:
            raise RuntimeError(IN_CHILD)
        if storages.is_unknown_on_cpu(tensor):
            raise RuntimeError(_UNKNOWN)
