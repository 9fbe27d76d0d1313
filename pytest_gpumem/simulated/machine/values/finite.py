"""Whether unknown numbers are finite: which operators ask, and which write an infinity or NaN.

Random numbers, activations, losses and gradients are assumed to be finite. Tensors that code fills
with an infinity or NaN are not, and neither are results of them, until an operator bounds them.
"""

from __future__ import annotations

import math
import operator as comparing
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.views import layout_of

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    name: getattr(comparing, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_SEARCHES = ("isnan", "isinf", "isposinf", "isneginf")

_aten = torch.ops.aten
QUESTIONS = frozenset(
    [getattr(_aten, name).default for name in _SEARCHES]
    + [getattr(_aten, name).Tensor for name in _COMPARISONS]
    + [getattr(_aten, name).Scalar for name in _COMPARISONS]
)
"""Operators that can check whether numbers are finite.

``isfinite`` runs ``x == x`` and ``x.abs() != inf``, ``isreal`` and code of users ``x != x``.
Source: aten/src/ATen/native/TensorCompare.cpp (isfinite, isinf, isnan), torch 2.6 to 2.15.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}{suffix}" for name in text.split() for suffix in ("", "_"))


FILLING = _names(
    "fill full new_full full_like masked_fill where index_fill index_put scatter masked_scatter "
    "constant_pad_nd copy add sub mul div"
)
"""Operators by which a program writes an infinity or NaN: ``x.masked_fill(mask, -inf)``."""


Read = Callable[[torch.Tensor], Any]
"""A function that returns the one number that a tensor holds; ``None`` if that is not known."""


class Infinity(IntEnum):
    """Kinds of infinity or NaN that a program has put into a tensor."""

    NONE = 0
    NEGATIVE = 1
    """Minus infinity and no other, as masks and running maxima begin."""
    ANY = 2


_BOUNDING = _names(
    "_softmax softmax _safe_softmax sigmoid tanh nan_to_num logsumexp clamp _softmax_backward_data "
    "_log_softmax_backward_data _scaled_dot_product_attention_math "
    + " ".join(
        f"_scaled_dot_product_{kernel}_attention{direction}"
        for kernel in ("flash", "efficient", "cudnn")
        for direction in ("", "_backward")
    )
)
"""Operators whose results are finite although an argument holds an infinity, as masks do.

The mask of fused attention enters only by its exponential, forward and backward.
"""

_RAISING = _names("exp exp2 relu amax max clamp_min")
"""Operators with finite results for minus infinity, where some elements they reduce are finite."""
_GREATER = _names("maximum fmax logaddexp")
"""Operators with finite results for minus infinity and a finite operand."""
_KEEPING = _names(
    "fill full new_full full_like masked_fill where index_fill index_put scatter masked_scatter "
    "constant_pad_nd copy _to_copy clone add cat stack index gather triu tril"
)
"""Operators that pass minus infinity on as it is."""
_SUBTRACTING = _names("sub")
"""Operators that pass minus infinity in their first argument on as it is."""


def answer(
    single: Read, infinity: Callable[[torch.Tensor], Infinity], func: Any, args: Args
) -> bool | None:
    """Return the result of ``func`` for finite numbers; ``None`` if it depends on the number."""
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if not is_number or infinity(tensor):
        return None
    name = func._schema.name.removeprefix("aten::")
    if name in _SEARCHES:
        return False
    compare = _COMPARISONS[name]
    other = args[1]
    if isinstance(other, torch.Tensor):
        if tensor is other or (
            storage_key(tensor) == storage_key(other) and layout_of(tensor) == layout_of(other)
        ):
            return compare(0.0, 0.0)  # each element with itself
        other = single(other)
    if isinstance(other, float) and math.isinf(other):
        return compare(0.0, other)
    return None


def infinity_from_numbers(single: Read, name: str, args: Args, kwargs: Kwargs) -> Infinity:
    """Return the kind of infinity among the numbers in the arguments of a filling operator."""
    numbers = []
    for value in (*args[1:], *kwargs.values()):
        number = single(value) if isinstance(value, torch.Tensor) else value
        if number.__class__ is float and not math.isfinite(number):
            numbers.append(number)
    return _kind(numbers, keeps_sign=name in _KEEPING)


def _kind(numbers: Iterable[float], *, keeps_sign: bool) -> Infinity:
    found = set(numbers)
    if not found:
        return Infinity.NONE
    return Infinity.NEGATIVE if keeps_sign and found == {-math.inf} else Infinity.ANY


def passed_on(name: str, given: list[Infinity]) -> Infinity:
    """Return the kind of infinity in the results of operator ``name``, given its arguments'."""
    worst = max(given, default=Infinity.NONE)
    if worst is Infinity.NONE or name in _BOUNDING:
        return Infinity.NONE
    if worst is Infinity.ANY:
        return worst
    if name in _RAISING or (name in _GREATER and Infinity.NONE in given):
        return Infinity.NONE
    keeps = name in _KEEPING or (name in _SUBTRACTING and given[1:] == [Infinity.NONE])
    return Infinity.NEGATIVE if keeps else Infinity.ANY


MOST_UPLOADED = 4_096
"""Most numbers of a CPU tensor that are checked when it is copied to the device."""


def held(source: torch.Tensor) -> Infinity:
    """Return the kind of infinity in a small CPU tensor."""
    if raw.is_on_device(source) or not source.dtype.is_floating_point:
        return Infinity.NONE
    if source.layout is not torch.strided or source.numel() > MOST_UPLOADED:
        return Infinity.NONE
    if source.dtype.itemsize == 1:  # torch has no isfinite for these
        source = source.float()
    infinite = source[~source.isfinite()]
    return _kind(infinite.tolist() if infinite.numel() else (), keeps_sign=True)
