"""Whether unknown numbers are finite: which operators ask, and which write an infinity or NaN.

Random numbers, activations, losses and gradients are taken for finite. What the code itself fills
with an infinity or NaN is not, nor what is computed from it, until an operator bounds it.
"""

from __future__ import annotations

import math
import operator as comparing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated import raw

if TYPE_CHECKING:
    from pytest_gpumem.simulated.values import Values

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": comparing.eq,
    "ne": comparing.ne,
    "lt": comparing.lt,
    "le": comparing.le,
    "gt": comparing.gt,
    "ge": comparing.ge,
}
_SEARCHES = ("isnan", "isinf", "isposinf", "isneginf")

_aten = torch.ops.aten
QUESTIONS = frozenset(
    [getattr(_aten, name).default for name in _SEARCHES]
    + [getattr(_aten, name).Tensor for name in _COMPARISONS]
    + [getattr(_aten, name).Scalar for name in _COMPARISONS]
)
"""Operators that can ask whether numbers are finite.

``isfinite`` asks ``x == x`` and ``x.abs() != inf``, ``isreal`` and code of users ``x != x``.
Source: aten/src/ATen/native/TensorCompare.cpp (isfinite, isinf, isnan), torch 2.6 to 2.15.
"""

FILLING = frozenset(
    f"aten::{name}{suffix}"
    for name in (
        "fill full new_full full_like masked_fill where index_fill index_put scatter "
        "masked_scatter constant_pad_nd copy add sub mul div"
    ).split()
    for suffix in ("", "_")
)
"""Operators by which a program writes an infinity or NaN: ``x.masked_fill(mask, -inf)``."""

_BOUNDING = frozenset(
    f"aten::{name}"
    for name in (
        "_softmax softmax _safe_softmax sigmoid sigmoid_ tanh tanh_ nan_to_num nan_to_num_ "
        "logsumexp clamp clamp_ _softmax_backward_data _log_softmax_backward_data "
        "_scaled_dot_product_attention_math _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    ).split()
)
"""Operators whose results are finite although an argument holds an infinity, as masks do."""


def answer(values: Values, func: Any, args: tuple[Any, ...]) -> bool | None:
    """What ``func`` yields for every element of finite numbers; ``None`` if it does not ask that.

    ``None``, too, where the program has put an infinity or NaN among them.
    """
    tensor = args[0]
    if not _is_unknown_number(values, tensor):
        return None
    name = func._schema.name.removeprefix("aten::")
    if name in _SEARCHES:
        return False
    compare = _COMPARISONS[name]
    other = args[1]
    if isinstance(other, torch.Tensor):
        if _is_same(tensor, other):
            return compare(0.0, 0.0)
        other = values.single(other)
    if isinstance(other, float) and math.isinf(other):
        return compare(0.0, other)
    return None


def _is_unknown_number(values: Values, tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return (
        (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.layout is torch.strided
        and not values.facts.is_infinite(tensor)
    )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether each element is compared with itself."""
    return one is other or (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def brings_infinity(values: Values, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number among the arguments of a filling operator is an infinity or NaN."""
    for value in (*args[1:], *kwargs.values()):
        number = value
        if isinstance(value, torch.Tensor):
            number = values.single(value)
        if number.__class__ is float and not math.isfinite(number):
            return True
    return False


def stays_infinite(name: str) -> bool:
    """Whether what the operator ``name`` computes of an infinity can be one."""
    return name not in _BOUNDING


MOST_UPLOADED = 4_096
"""Numbers of a CPU tensor that are looked at when it is copied to the device."""


def holds_infinity(source: torch.Tensor) -> bool:
    """Whether a small CPU tensor holds an infinity or NaN."""
    if raw.is_meta(source) or not source.dtype.is_floating_point:
        return False
    if source.layout is not torch.strided or source.numel() > MOST_UPLOADED:
        return False
    return not bool(source.isfinite().all())
