"""Zeros without memory (``torch._efficientzerotensor``), which forward-mode derivatives add up.

Sums and products of them have kernels of their own, which find type and shape of a result on
``meta``: zeros go there as one number that is expanded, in memory for so long. Source:
aten/src/ATen/native/BinaryOps.cpp (maybe_add_maybe_sub, mul_zerotensor, div_zerotensor),
native/cuda/Blas.cpp (dot_cuda), ATen/ZeroTensorFallback.cpp; seen with torch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from pytest_gpumem.simulated.common.raw import META

_aten = torch.ops.aten


def _is_zero(one: Any) -> bool:
    return isinstance(one, Tensor) and one._is_zerotensor()


def _asked(self: Any, other: Any, kind: Any = KIND.DEFAULT) -> tuple[torch.Size, dict[str, Any]]:
    """Return shape and options of a result, after the zeros were made to ask ``meta`` for them."""
    for each in filter(_is_zero, (other, self)):
        _aten.zeros((), dtype=each.dtype, device=META)
    shapes = [each.shape for each in (self, other) if isinstance(each, Tensor)]
    _, dtype = elementwise_dtypes(self, other, type_promotion_kind=kind)
    return torch.broadcast_shapes(*shapes), {"dtype": dtype, "device": META}


def _product(self: Any, other: Any) -> Tensor:
    shape, options = _asked(self, other)
    return _aten._efficientzerotensor(shape, **options)  # type: ignore[no-any-return]


def _quotient(self: Any, other: Any) -> Tensor:
    shape, options = _asked(self, other, KIND.INT_TO_FLOAT)
    if _is_zero(other):
        number = torch.nan if _is_zero(self) else torch.inf
        return _aten.full(shape, number, **options)  # type: ignore[no-any-return]
    return _aten._efficientzerotensor(shape, **options)  # type: ignore[no-any-return]


def _sum(self: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    given = other if _is_zero(self) else self
    if _is_zero(given):
        return _product(self, other)
    shape, options = _asked(self, other)
    if isinstance(given, Tensor):
        copied = _aten._to_copy(given.expand(shape), dtype=options["dtype"])
    else:
        copied = _aten.full(shape, given, **options)
    result: Tensor = copied.mul(alpha) if given is other and alpha != 1 else copied
    return result


def _dot(self: Tensor, other: Tensor) -> Tensor:
    return _aten._efficientzerotensor((), dtype=self.dtype, device=META)  # type: ignore[no-any-return]


KERNELS: dict[str, Callable[..., Tensor]] = {
    "add.Tensor": _sum,
    "sub.Tensor": lambda self, other, *, alpha=1: _sum(self, other, alpha=-alpha),
    "mul.Tensor": _product,
    "div.Tensor": _quotient,
    "dot": _dot,
    "vdot": _dot,
}
"""By overload, for torch's dispatch key ``ZeroTensor``."""
