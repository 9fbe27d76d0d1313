"""What transformer-engine lets ``torch.compile`` fuse: bias with GELU, bias with dropout.

Source: transformer_engine/pytorch/jit.py of 2.8 (``bias_gelu_fused_``, ``bgrad_dgelu_fused_``,
``bias_dropout_add``), where ``lazy_compile`` compiles each on its first call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem.simulated.compiled.entry import libraries_compile
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import refuse
from pytest_gpumem.simulated.stand_ins.usage import keeping

_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
"""Of the approximation of GELU by tanh."""


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (torch.tanh(_SLOPE * x * (_CUBIC * x * x + 1.0)) + 1.0)


def _slope_of_gelu(grad: Tensor, x: Tensor) -> Tensor:
    bent = torch.tanh(_SLOPE * x * (_CUBIC * x * x + 1.0))
    inner = (1 - bent * bent) * (_SLOPE + 3 * _SLOPE * _CUBIC * x * x)
    return grad * (0.5 * (1 + bent) + 0.5 * x * inner)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return _gelu(x + bias)


def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = _slope_of_gelu(grad, x + bias)
    return made.sum(dim=0), made


def _bias_dropout_add_train(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + functional.dropout(x + bias, p=p, training=True)


def _bias_dropout_add_inference(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + functional.dropout(x + bias, p=p, training=False)


_COMPILED: tuple[Callable[..., Any], ...] = (
    _gelu,
    _slope_of_gelu,
    _bias_gelu,
    _bias_gelu_backward,
    _bias_dropout_add_train,
    _bias_dropout_add_inference,
)
libraries_compile.update(function.__code__ for function in _COMPILED)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    if os.environ.get("NVTE_TORCH_COMPILE", "1") == "0":
        refuse("NVTE_TORCH_COMPILE=0")
    compiled = keeping(f"transformer-engine's {function.__name__}", lambda: torch.compile(function))
    with torch.autocast("cuda", enabled=False):
        return compiled(*args)


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """bias_gelu_fused()."""
    made: Tensor = _called(_gelu, x) if bias is None else _called(_bias_gelu, x, bias)
    return made


def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """bgrad_dgelu_fused(): the gradients of the bias and of what it is added to."""
    if bias is None:
        return None, _called(_slope_of_gelu, grad, x)
    of_bias, made = _called(_bias_gelu_backward, grad, x, bias)
    return of_bias, made


def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float, *, training: bool
) -> Tensor:
    """bias_dropout_add_fused_train() and _inference(), under ``enable_grad`` as both are called."""
    function = _bias_dropout_add_train if training else _bias_dropout_add_inference
    with torch.enable_grad():
        made: Tensor = _called(function, x, bias, residual, p)
    return made
