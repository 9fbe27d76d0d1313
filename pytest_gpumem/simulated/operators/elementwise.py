"""Kernels that a user writes in C++ for one element, and torch compiles for a GPU.

Source: torch/cuda/jiterator.py and aten/src/ATen/native/cuda/jit_utils.cpp, cuda/jiterator.cu
(CompileAndLaunchKernel: outputs of a TensorIterator whose type all inputs are promoted to), torch
2.6 to 2.15. Their values are unknown.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides


def jiterated(function: Any, *tensors: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """Return the outputs of a compiled kernel, as large as its inputs are together.

    Raises ``KeyError`` in torch's words for an argument that the kernel does not have.
    """
    for name in kwargs:
        if name not in function.kwargs_dict:
            raise KeyError(f"{name} is not declared in function definition")
    spread = torch.broadcast_tensors(*tensors)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    strides = compute_elementwise_output_strides(*spread)
    made = tuple(
        torch.empty_strided(spread[0].shape, strides, dtype=dtype, device=tensors[0].device)
        for _ in range(function.num_outputs)
    )
    return made if len(made) > 1 else made[0]
