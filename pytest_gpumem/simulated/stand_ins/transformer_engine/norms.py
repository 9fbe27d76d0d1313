"""``LayerNorm`` and ``RMSNorm``: transformer_engine/pytorch/module/layernorm.py, rmsnorm.py,
ops/basic/layer_norm.py, ops/basic/rmsnorm.py and ops/fuser.py of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.stand_ins.transformer_engine import fp8, kernels


class _Normalizing(torch.autograd.Function):
    """_OperationFuserAutogradFunction of one norm."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: str,
        differentiable: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalize."""
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else weight.dtype
        columns = weight.numel()
        x = input.contiguous().to(dtype).view(-1, columns)
        cast = [each.to(dtype).view(columns) for each in (weight, bias) if each is not None]
        out, mean, deviation = kernels.normalize(norm, x, cast[0], cast[1] if cast[1:] else None)
        ctx.save_for_backward(x, weight, deviation, mean)
        ctx.norm = norm
        # Outside of regions of fp8 too, as the first operation of one might be.
        ctx.ends_step = differentiable and fp8.manager().take_first()
        made: Tensor = out.view(input.shape)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of input, weight and bias."""
        x, weight, deviation, mean = ctx.saved_tensors
        grad = grads[0].contiguous().to(x.dtype).view(x.shape)
        given = weight.to(x.dtype).view(-1)
        made, gamma, beta = kernels.differentiate_norm(ctx.norm, grad, x, mean, deviation, given)
        kernels.clear(x, *(() if mean is None else (mean,)), deviation)
        if ctx.ends_step:
            fp8.manager().update(forward=False)
        shaped = [each if each is None else each.view(weight.shape) for each in (gamma, beta)]
        return None, None, made.view(grads[0].shape), *shaped


_apply: Callable[..., Tensor] = _Normalizing.apply


class _Norm(nn.Module):
    _names: tuple[str, ...] = ()

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        if sm_margin != 0:
            kernels.refuse(f"{type(self).__name__}(sm_margin={sm_margin!r})")
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        shape = tuple(normalized_shape)
        where = "cuda" if device is None else device
        for name in self._names:
            made = torch.empty(shape, device=where, dtype=params_dtype or dtype)
            self.register_parameter(name, nn.Parameter(made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights are ones, or zeros to which one is added; biases are zeros."""
        for name in self._names:
            ones = name == "weight" and not self.zero_centered_gamma
            (nn.init.ones_ if ones else nn.init.zeros_)(getattr(self, name))
            if self.sequence_parallel is not None:
                getattr(self, name).sequence_parallel = self.sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions."""
        weights = [getattr(self, name) for name in self._names]
        shape = tuple(weights[0].shape)
        if tuple(input.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"Input tensor (shape={tuple(input.shape)}) and weight tensor (shape={shape}) "
                f"are not compatible"
            )
        differentiable = torch.is_grad_enabled() and any(
            each.requires_grad for each in (input, *weights)
        )
        return _apply(type(self).__name__, differentiable, input, *weights)


class LayerNorm(_Norm):
    """A layer norm."""

    _names = ("weight", "bias")


class RMSNorm(_Norm):
    """A norm by the root of mean squares."""

    _names = ("weight",)
