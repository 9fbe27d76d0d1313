"""Comparisons of whole tensors, searches and assertions: their parts and conversions.

Source: aten/src/ATen/native/cuda/Equal.cpp (cuda_equal), native/TensorCompare.cpp (isclose,
allclose, isin), cuda/TensorCompare.cu (isin_default_kernel_gpu,
_assert_async_cuda), BucketizationUtils.h
(searchsorted_maybe_trim_input_tensors), Bucketization.cpp, of torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.views import layout_of
from pytest_gpumem.simulated.operators.layout import copied
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, passing

_as_it_is = torch.ops.aten.isclose.default.decompose


def isclose(self: Tensor, other: Tensor, rtol: float, atol: float, equal_nan: bool) -> Tensor:
    """``aten::isclose``; where NaN equals NaN it works in place, which C++ does not of subclasses.

    The other branch is left to torch.
    """
    is_wide = self.is_floating_point() or self.is_complex()
    if not (equal_nan and is_wide and self.dtype == other.dtype and rtol >= 0 and atol >= 0):
        return _as_it_is(self, other, rtol, atol, equal_nan)  # type: ignore[no-any-return]  # an operator
    close = self == other
    are_nan, others = self.isnan(), other.isnan()
    close.__ior__(are_nan.__iand__(others))
    del others, are_nan
    if not rtol and not atol:
        return close
    product = rtol * other
    size = product.abs()
    allowed = atol + size
    del size, product
    difference = self - other
    actual = difference.abs()
    del difference
    is_finite = actual.isfinite()
    is_small = actual <= allowed
    close.__ior__(is_finite.__iand__(is_small))
    del is_small, is_finite, actual, allowed
    return close


def _equal(self: Tensor, other: Tensor) -> None:
    if self.shape != other.shape or not self.numel():
        return
    # The same elements of memory are equal unseen, but for NaN.
    if storage_key(self) == storage_key(other) and layout_of(self) == layout_of(other):
        return
    _all(self == other)


def _all(each: Tensor) -> None:
    every = each.all()
    del every


def _allclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> None:
    _all(torch.isclose(self, other, rtol, atol, equal_nan))


PARTS: dict[str, Callable[..., None]] = {"aten::equal": _equal, "aten::allclose": _allclose}
"""Functions that run the parts of an operator whose result is a Python number."""

COMPOSITES: dict[str, Composite] = {"aten.isclose.default": isclose}


def _isin(gpu: GPU, elements: Tensor | None = None, test_elements: Tensor | None = None) -> None:
    """Run isin: few others are compared with all, eq().any(-1); many are sorted, by values."""
    if elements is None or test_elements is None:
        return
    count, others = elements.numel(), test_elements.numel()
    if count and others < int(10 * math.pow(count, 0.145)):
        passing(gpu, count * others, count)


def _number(gpu: GPU, self: Tensor | float, sorter: Tensor | None = None) -> Scratch | None:
    """Make a number a tensor of 64 bits, and check the places in ``sorter``."""
    scratch = None if isinstance(self, Tensor) else Scratch(gpu, 8)
    if sorter is not None and sorter.numel():
        passing(gpu, 8, 8)
    return scratch


def _search(
    gpu: GPU,
    self: Tensor | float,
    sorted_sequence: Tensor | None = None,
    boundaries: Tensor | None = None,
    sorter: Tensor | None = None,
) -> None:
    sorted = boundaries if sorted_sequence is None else sorted_sequence
    assert sorted is not None
    if not sorted.numel() or (isinstance(self, Tensor) and not self.numel()):
        return
    tensor = self if isinstance(self, Tensor) else None
    scratch = Scratch(gpu, *copied(tensor, sorted, sorter))
    common = torch.result_type(sorted, self)
    number = torch.float64 if isinstance(self, float) else torch.int64
    if (number if tensor is None else tensor.dtype) != common:
        scratch.take((1 if tensor is None else tensor.numel()) * common.itemsize)
    if sorted.dtype != common:
        scratch.take(sorted.numel() * common.itemsize)


def _assert(gpu: GPU, self: Tensor) -> None:
    """Stop the call; on a GPU a failed assertion stops the process's CUDA at its next call."""
    if self.numel() != 1:
        many = "more than one value" if self.numel() else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
    known = gpu.simulation.values.known(self)
    if known is not None and not known.item():
        error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
        raise error("CUDA error: device-side assert triggered")


RULES = {
    "_assert_async": Rule(before=_assert),
    "isin": Rule(after=_isin),
    "searchsorted bucketize": Rule(before=_number, after=_search),
}
