"""Tensors of several devices in one operator: allowed ones, and torch's errors for the rest.

Operators with a CUDA kernel compare the devices of all their tensors, in the order of their
arguments, unless native_functions.yaml has ``device_check: NoCheck``
(torchgen/dest/register_dispatch_key.py, gen_device_check; ATen/core/adaption.cpp,
common_device_check_failure). The others are built on TensorIterator, which lets a number on the
host stand beside CUDA tensors (ATen/TensorIterator.cpp, compute_types). torch 2.6 to 2.15.

With a tensor on ``meta`` among them torch runs the meta kernel. Most of these compare devices in
Python (torch/_prims_common/__init__.py, check_same_device); those that do not (``mm``, ``gather``)
return uninitialised memory, which is refused here in the same words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pytest_gpumem.allocator.settings import Version
from pytest_gpumem.simulated.common.nesting import tensors_in

NO_DATA = "Cannot copy out of meta tensor; no data!"
"""Source: aten/src/ATen/native/Copy.cpp (copy_impl), torch 2.6 to 2.15; a NotImplementedError."""

NUMBER = "number"
"""The place of a number that C++ made a tensor of: it may stand anywhere."""

NAMES_ITS_ARGUMENT: Version = (2, 8)
"""First release whose text begins with the argument (pytorch/pytorch pull request 155085)."""

INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index _unsafe_index index_put index_put_ _index_put_impl_ _unsafe_index_put"
    ).split()
)
_ANYWHERE = (
    "aten::_foreach_copy",
    "aten::_pack_padded_sequence",
    "aten::_ctc_loss",
    "aten::ctc_loss",
    "aten::convolution",
    "aten::_efficient_attention_backward",
)
"""Operators whose tensors have devices of their own (lengths or seeds on the host, lists of several
GPUs),
and convolutions, which compare them themselves (operators/convolution.py)."""

_STANDS_FOR: dict[str, tuple[Any, dict[str, str]]] = {
    "aten::embedding": (
        torch.ops.aten.index_select.default,
        {"weight": "self", "indices": "index"},
    )
}
"""Operators without a kernel that call another with their tensors (Embedding.cpp)."""


@dataclass(frozen=True)
class Placed:
    """A tensor argument and where it is: a device, or ``NUMBER``."""

    name: str
    tensor: torch.Tensor
    device: str

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number on the host."""
        return self.device == NUMBER or (self.device == "cpu" and not self.tensor.dim())


def placed(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: Callable[[torch.Tensor], str],
) -> list[Placed]:
    """Return the tensors among the arguments of ``func``, in the order of its schema."""
    names = [argument.name for argument in func._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    return [Placed(name, each, place(each)) for name, value in given for each in tensors_in(value)]


def refuse_mixed(func: Any, tensors: Sequence[Placed], version: Version) -> None:
    """Raise torch's error if ``tensors``, the arguments of ``func``, are on too many devices."""
    devices = {each.device for each in tensors} - {NUMBER}
    if len(devices) < 2 or not any(device.startswith("cuda") for device in devices):
        return
    name = func._schema.name.removesuffix("_")
    if name in INDEXING:
        _refuse_indices(tensors)
    if "meta" in devices:
        raise RuntimeError(_beside_meta(tensors))
    if name == "aten::masked_fill":
        _refuse_mask(tensors)
    if not name.startswith(_ANYWHERE):
        _refuse_host(func, tensors, version)


def _refuse_host(func: Any, tensors: Sequence[Placed], version: Version) -> None:
    if func._schema.name in _STANDS_FOR:
        func, names = _STANDS_FOR[func._schema.name]
        tensors = [replace(each, name=names[each.name]) for each in tensors]
    method = _checked_by(func)
    if method is not None:
        _refuse_any(tensors, method, version)
    large = [
        each
        for each in tensors
        if not each.is_scalar and not (each.name == "indices" and each.device == "cpu")
    ]
    if len({each.device for each in large}) > 1:
        raise RuntimeError(two_devices([each.device for each in large]))


def _beside_meta(tensors: Sequence[Placed]) -> str:
    large = [each for each in tensors if not each.is_scalar]
    expected = large[0].device
    other = next(each for each in large if each.device != expected)
    if other.name == "out":
        return (
            f"Attempting to copy from device {expected} to device {other.device}, but "
            f"cross-device copies are not allowed!"
        )
    return f"Tensor on device {other.device} is not on the expected device {expected}!"


def two_devices(devices: Sequence[str]) -> str:
    """Return TensorIterator's error: the first device that is not the host is the common one."""
    common = next(device for device in devices if device != "cpu")
    other = next(device for device in devices if device != common)
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{common} and {other}!"
    )


def _refuse_any(tensors: Sequence[Placed], method: str, version: Version) -> None:
    compared = sorted(
        (each for each in tensors if each.device != NUMBER), key=lambda each: each.name != "out"
    )
    common = compared[0].device
    other = next((each for each in compared if each.device != common), None)
    if other is None:
        return
    if version >= NAMES_ITS_ARGUMENT:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got {other.name} is on "
            f"{other.device}, different from other tensors on {common} (when checking argument in "
            f"method {method})"
        )
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {common} "
        f"and {other.device}! (when checking argument for argument {other.name} in method {method})"
    )


# Operators with words of their own.


def indices_elsewhere(target: str) -> str:
    """TensorAdvancedIndexing.cpp (make_info), torch 2.6 to 2.15."""
    return f"indices should be either on cpu or on the same device as the indexed tensor ({target})"


def _refuse_indices(tensors: Sequence[Placed]) -> None:
    target = tensors[0].device
    indices = {each.device for each in tensors if each.name == "indices"}
    if indices - {"cpu", NUMBER, target}:
        raise RuntimeError(indices_elsewhere(target))


def _refuse_mask(tensors: Sequence[Placed]) -> None:
    """cuda/IndexKernel.cpp (masked_fill__cuda), torch 2.6 to 2.15."""
    target, mask = tensors[0].device, tensors[1].device
    if target == "cpu" and mask == target:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    if mask != target:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {mask} and self on "
            f"{target}"
        )


# torch's declarations of its operators.


@functools.cache
def _native_functions() -> str:
    package = find_spec("torchgen")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "packaged/ATen/native/native_functions.yaml"
    return path.read_text(encoding="utf-8")


@functools.cache
def _checked_by(func: Any) -> str | None:
    """Return the name under which ``func``'s CUDA kernel compares devices; ``None`` if it does not.

    Source: torchgen/dest/register_dispatch_key.py (wrapper_kernel_sig, gen_one) and
    torchgen/api/native.py (name).
    """
    schema = func._schema
    full = schema.name.removeprefix("aten::")
    overload = schema.overload_name
    signature = f"{full}.{overload}" if overload else full
    pattern = rf"^- func: {re.escape(signature)}\(.*\n((?:(?!- func).*\n)*)"
    entry = re.search(pattern, _native_functions(), re.MULTILINE)
    if entry is None or "device_check: NoCheck" in entry[1]:
        return None
    name = f"{full}_out" if any(argument.is_out for argument in schema.arguments) else full
    if re.search(r"structured(?:_delegate)?: ", entry[1]):
        return f"wrapper_CUDA_{name}_{overload}" if overload else f"wrapper_CUDA_{name}"
    if re.search(r"^    (?:\w+, )*CUDA\b.*: ", entry[1], re.MULTILINE):
        return f"wrapper_CUDA_{overload}_{name}"
    return None
