"""Operators that autograd sees whole and that one native function builds from others.

They have no kernel for CUDA: CompositeExplicitAutograd in native_functions.yaml, where ``meta``
has a kernel only for the shape of the result. Source: aten/src/ATen/native/Distance.cpp
(_euclidean_dist, which cdist_impl takes for more than 25 rows), AffineGridGenerator.cpp, Loss.cpp
(binary_cross_entropy_with_logits), ReduceOps.cpp (dist), BinaryOps.cpp (ldexp), UnaryOps.cpp
(mvlgamma), TensorAdvancedIndexing.cpp (_unsafe_masked_index) and
TensorCompare.cpp (isinf); Linear.cpp (_trilinear, sumproduct_pair: a product of three tensors, one
slice after the other), torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    "linalg_pinv.atol_rtol_tensor",
    "mvlgamma.default",
)


_KEYS = (
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)


def _as_built(name: str) -> Composite:
    name, _, overload = name.partition(".")

    def built(*args: Any) -> Any:
        operator = getattr(getattr(torch.ops.aten, name), overload)
        named = [each.name for each in operator._schema.arguments if each.kwarg_only]
        given, kept = args[: len(args) - len(named)], args[len(args) - len(named) :]
        kwargs = dict(zip(named, kept, strict=True))
        for key in _KEYS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name):
                return operator._op_dk(key, *given, **kwargs)
        raise AssertionError(operator)

    return built


def trilinear(*args: Any) -> Tensor:
    """``aten::_trilinear``: sums over ``sumdim`` of products, unrolled along ``unroll_dim``."""
    *given, sumdim, unroll_dim = args
    expands = given[3:]
    tensors = [_expanded(tensor, expand) for tensor, expand in zip(given, expands, strict=False)]
    sizes = [
        next(
            tensor.shape[dim]
            for tensor, expand in zip(tensors, expands, strict=True)
            if dim not in expand
        )
        for dim in range(tensors[0].dim())
    ]
    summed = [dim for dim in sumdim if dim != unroll_dim]
    of_two = [dim for dim in summed if dim in expands[2]]
    of_three = [dim for dim in summed if dim not in expands[2]]
    shape = [1 if dim in sumdim else size for dim, size in enumerate(sizes)]
    output = torch.zeros(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    if all(tensor.numel() for tensor in tensors):
        for at in range(sizes[unroll_dim]):
            one, two, three = (
                tensor.narrow(unroll_dim, at if tensor.shape[unroll_dim] > 1 else 0, 1)
                for tensor in tensors
            )
            first = _sumproduct_pair(one, two, of_two)
            second = _sumproduct_pair(first, three, of_three)
            del first  # buf is assigned anew
            target = output if unroll_dim in sumdim else output.narrow(unroll_dim, at, 1)
            target.add_(second)
            del second, target
    return output.squeeze(tuple(sumdim))


def _expanded(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims):
        tensor = tensor.unsqueeze(dim)
    return tensor


def _sumproduct_pair(left: Tensor, right: Tensor, sum_dims: Sequence[int]) -> Tensor:
    """Return a batched product of matrices; sums keep their dimensions."""
    if not sum_dims:
        return left * right
    both, of_left, of_right = [], [], []
    size = 1
    for dim in range(left.dim()):
        is_left, is_right = left.shape[dim] != 1, right.shape[dim] != 1
        if dim in sum_dims:
            if is_left and is_right:
                size *= left.shape[dim]
            elif is_left:
                left = left.sum(dim, keepdim=True)
            elif is_right:
                right = right.sum(dim, keepdim=True)
        elif is_left and is_right:
            both.append(dim)
        elif is_left:
            of_left.append(dim)
        else:
            of_right.append(dim)
    sizes = [
        math.prod(tensor.shape[dim] for dim in dims)
        for tensor, dims in ((left, both), (left, of_left), (right, of_right))
    ]
    summed = list(sum_dims)
    rows = left.permute([*both, *of_left, *summed, *of_right])
    columns = right.permute([*both, *summed, *of_right, *of_left])
    rows = rows.reshape(sizes[0], sizes[1], size)
    columns = columns.reshape(sizes[0], size, sizes[2])
    product = torch.bmm(rows, columns)
    del rows, columns
    order = [*both, *of_left, *summed, *of_right]
    # Of a dimension that is left, one of both has the size, and the other is 1.
    shape = [1 if dim in summed else max(left.shape[dim], right.shape[dim]) for dim in order]
    return product.view(shape).permute([order.index(dim) for dim in range(left.dim())])


BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten._trilinear.default": trilinear,
    **{f"aten.{name}": _as_built(name) for name in _BUILT},
}
"""By overload."""
