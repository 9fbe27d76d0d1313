"""Operators that autograd sees whole and that one native function builds from others.

They have no kernel for CUDA: CompositeExplicitAutograd in native_functions.yaml, where ``meta``
has a kernel only for the shape of the result. Source: aten/src/ATen/native/Distance.cpp
(_euclidean_dist, which cdist_impl takes for more than 25 rows), AffineGridGenerator.cpp, Loss.cpp
(binary_cross_entropy_with_logits), ReduceOps.cpp (dist), BinaryOps.cpp (ldexp), UnaryOps.cpp
(mvlgamma), TensorAdvancedIndexing.cpp (_unsafe_masked_index) and
TensorCompare.cpp (isinf), torch 2.6 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.operators.rules import Composite

_BUILT = (
    "_euclidean_dist.default",
    "_unsafe_masked_index.default",
    "_unsafe_masked_index_put_accumulate.default",
    "affine_grid_generator.default",
    "binary_cross_entropy_with_logits.default",
    "dist.default",
    "isinf.default",
    "ldexp.Tensor",
    "mvlgamma.default",
)


def _as_built(name: str) -> Composite:
    name, _, overload = name.partition(".")

    def built(*args: Any) -> Any:
        operator = getattr(getattr(torch.ops.aten, name), overload)
        return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)

    return built


IN_VIEW: dict[str, Composite] = {f"aten.{name}": _as_built(name) for name in _BUILT}
"""By overload."""
