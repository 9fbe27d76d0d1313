"""Operators that autograd sees whole and that one native function builds from others.

They have no kernel for CUDA: CompositeExplicitAutograd in native_functions.yaml, where ``meta``
has a kernel for the shape of the result alone. Source: aten/src/ATen/native/Distance.cpp
(_euclidean_dist, which cdist_impl takes for more than 25 rows), native/ReduceOps.cpp (dist) and
TensorCompare.cpp (isinf), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BUILT = ("_euclidean_dist", "dist", "isinf")


def _as_built(name: str) -> Callable[..., Any]:
    def built(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(torch.ops.aten, name).default
        return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

    return built


IN_VIEW: dict[str, Callable[..., Any]] = {
    f"aten.{name}.default": _as_built(name) for name in _BUILT
}
"""By overload."""
