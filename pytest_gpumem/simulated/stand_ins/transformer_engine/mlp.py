"""``LayerNormMLP``: transformer_engine/pytorch/module/layernorm_mlp.py of 2.8."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pytest_gpumem.simulated.stand_ins.transformer_engine import activations, fused, kernels
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import (
    Call,
    Init,
    Module,
    default_init,
    in_fp8,
    narrow_bias,
    restored,
    two_dimensional,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import (
    check_shapes,
    manager,
    normalize_to_fp8,
    quantize,
    quantize_with_bias,
    quantized,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import (
    cast,
    clear,
    gemm,
    gemm_gelu,
)


def _dropped(*tensors: Tensor | None) -> None:
    clear(*(each for each in tensors if each is not None))


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        norm: str,
        activation: str,
        fuses_bias: bool,
        dtype: torch.dtype,
        call: Call,
        returned: bool,
    ) -> Any:
        """Normalize, multiply, activate and multiply."""
        ctx.shape, ctx.dtype, ctx.norm, ctx.activation = input.shape, dtype, norm, activation
        ctx.is_fp8, ctx.returned = call.state is not None, returned
        ctx.fuses_bias = fuses_bias and not ctx.is_fp8
        ctx.needs = fc1_weight.requires_grad, fc2_weight.requires_grad
        ctx.needs_input = any(
            each is not None and each.requires_grad for each in (input, gamma, beta)
        )
        ctx.needs_bias = fc1_bias is not None and fc1_bias.requires_grad
        ctx.has_bias = fc1_bias is not None, fc2_bias is not None
        given = input, gamma, beta, fc1_weight, fc2_weight, fc1_bias, fc2_bias
        flat = input.view(-1, input.shape[-1])
        run = _forward_in_fp8 if ctx.is_fp8 else _forward
        out, normal = run(ctx, flat, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias, call)
        ctx.ends_step = ctx.is_fp8 and call.ends_step(*given)
        shaped = out.view(-1, *input.shape[1:-1], out.shape[-1])
        return shaped if normal is None or not returned else (shaped, normal.view(input.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of all that was given."""
        run = _backward_in_fp8 if ctx.is_fp8 else _backward
        found: tuple[Any, ...] = run(ctx, *grads)
        return *found, *([None] * 6)


def _forward(
    ctx: Any,
    flat: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    dtype = ctx.dtype
    x, gamma = cast(flat, dtype), cast(gamma, dtype)
    beta = None if beta is None else cast(beta, dtype)
    normal, mean, deviation = kernels.normalize(ctx.norm, x, gamma, beta)
    first, second = cast(fc1_weight, dtype), cast(fc2_weight, dtype)
    fc1_bias = None if fc1_bias is None else cast(fc1_bias, dtype)
    fc2_bias = None if fc2_bias is None else cast(fc2_bias, dtype)
    product = plain = None
    if ctx.fuses_bias:
        plain, _ = gemm(first, normal, dtype)
    elif ctx.activation == "gelu":
        activated, product = gemm_gelu(first, normal, dtype, fc1_bias)
    else:
        product, _ = gemm(first, normal, dtype, bias=fc1_bias)
    if not call.differentiable and not ctx.returned:
        clear(normal)
    if plain is not None:
        activated = fused.bias_gelu(plain, fc1_bias)
    elif ctx.activation != "gelu" and product is not None:
        activated = activations.activate(ctx.activation, product)
    if not call.differentiable:
        _dropped(product)
    out, _ = gemm(second, activated, dtype, bias=fc2_bias)
    if not call.differentiable:
        _dropped(activated, plain)
        return out, normal
    if not ctx.needs[0] and not ctx.returned:
        clear(normal)
    if not ctx.needs[1]:
        clear(activated)
    ctx.save_for_backward(
        x,
        gamma,
        normal if ctx.needs[0] else None,
        first,
        fc1_bias,
        product,
        plain,
        activated if ctx.needs[1] else None,
        second,
        fc2_bias,
        mean,
        deviation,
    )
    return out, normal


def _backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Any, ...]:
    x, gamma, normal, first, fc1_bias, product, plain, activated, second, fc2_bias, *sums = (
        ctx.saved_tensors
    )
    grad = two_dimensional(grad)
    # As the library does, this keeps a name for each product until it returns.
    of_activated, _ = gemm(second, grad, ctx.dtype, layout="NN", grad=True)
    of_second = of_second_bias = of_first = of_first_bias = None
    if ctx.needs[1]:
        of_second, of_second_bias = gemm(
            activated, grad, ctx.dtype, layout="NT", bias=fc2_bias, grad=True
        )
        clear(activated)
    if plain is not None:
        of_first_bias, dact = fused.bias_gelu_backward(of_activated, plain, fc1_bias)
    else:
        # GELU is the epilogue of the product that makes its gradient.
        dact = of_activated
        if ctx.activation != "gelu":
            dact = activations.differentiate(of_activated, product)
        if ctx.needs_bias and not ctx.needs[0]:
            of_first_bias = dact.sum(dim=0)
    _dropped(product, plain)
    inner, _ = gemm(first, dact, ctx.dtype, layout="NN", grad=True)
    if ctx.needs[0]:
        if plain is not None:
            of_first, _ = gemm(normal, dact, ctx.dtype, layout="NT")
        else:
            of_first, of_first_bias = gemm(
                normal, dact, ctx.dtype, layout="NT", bias=fc1_bias, grad=True
            )
        clear(dact, normal)
    found = _norm_backward(ctx, inner, others, x, sums, gamma)
    return *found, of_first, of_first_bias, of_second, of_second_bias


def _norm_backward(
    ctx: Any, inner: Tensor, others: Any, x: Tensor, sums: list[Any], gamma: Tensor
) -> tuple[Any, ...]:
    if ctx.returned:
        inner = inner + others[0].view_as(inner)
    inner, of_gamma, of_beta = kernels.differentiate_norm(ctx.norm, inner, x, *sums, gamma)
    _dropped(*sums)
    return inner.view(ctx.shape) if ctx.needs_input else None, of_gamma, of_beta


def _forward_in_fp8(
    ctx: Any,
    flat: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    dtype, state, normal = ctx.dtype, call.state, None
    check_shapes(flat, fc1_weight, fc2_weight)
    x, gamma = cast(flat, dtype), cast(gamma, dtype)
    beta = None if beta is None else cast(beta, dtype)
    needed = call.differentiable and ctx.needs[0]
    if ctx.returned:
        normal, mean, deviation = kernels.normalize(ctx.norm, x, gamma, beta)
        narrow = quantize(normal, transposed=needed)
    else:
        made, mean, deviation = normalize_to_fp8(ctx.norm, x, gamma, beta, needed)
        narrow = quantized(made)
        del made
    if state is None:
        raise RuntimeError("fp8 without its state")
    transposed = call.differentiable
    first = state.weight(fc1_weight, transposed=transposed, first=call.first)
    second = state.weight(fc2_weight, transposed=transposed, first=call.first, index=1)
    fc1_bias = None if fc1_bias is None else cast(fc1_bias, narrow_bias(dtype))
    fc2_bias = None if fc2_bias is None else cast(fc2_bias, narrow_bias(dtype))
    product, _ = gemm(first.data, narrow.data, dtype, bias=fc1_bias)
    if not call.differentiable:
        narrow.clear()
    activated = activations.activate_to_fp8(ctx.activation, product)
    if not call.differentiable:
        clear(product)
    out, _ = gemm(second.data, activated.data, dtype, bias=fc2_bias)
    if not call.differentiable:
        activated.clear()
        return out, normal
    if not ctx.needs[0] and not ctx.returned:
        narrow.clear()
    if not ctx.needs[1]:
        activated.clear()
    nothing = None, None, None
    ctx.save_for_backward(
        x,
        gamma,
        *(narrow.saved() if ctx.needs[0] else nothing),
        *first.saved(),
        product,
        *(activated.saved() if ctx.needs[1] else nothing),
        *second.saved(),
        fc1_bias,
        fc2_bias,
        mean,
        deviation,
    )
    return out, normal


def _backward_in_fp8(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Any, ...]:
    x, gamma, *rest, mean, deviation = ctx.saved_tensors
    normal, first = restored(rest[:3]), restored(rest[3:6])
    product, activated, second = rest[6], restored(rest[7:10]), restored(rest[10:13])
    del rest
    narrow, of_second_bias = in_fp8(two_dimensional(grad), has_bias=ctx.has_bias[1])
    of_activated, _ = gemm(second.data, narrow.data, ctx.dtype, layout="NN", grad=True)
    of_second = of_first = None
    if ctx.needs[1]:
        activations.transpose(activated)
        of_second, _ = gemm(activated.upright, narrow.data, ctx.dtype, layout="NT", grad=True)
        activated.clear()
    if ctx.activation in activations.PLAIN:
        of_first_bias, dact = activations.differentiate_to_fp8(of_activated, product)
    else:
        wide = activations.differentiate(of_activated, product)
        of_first_bias, dact = quantize_with_bias(wide)
        del wide
    clear(product)
    inner, _ = gemm(first.data, dact.data, ctx.dtype, layout="NN", grad=True)
    if ctx.needs[0]:
        of_first, _ = gemm(normal.upright, dact.data, ctx.dtype, layout="NT")
        dact.clear()
        normal.clear()
    found = _norm_backward(ctx, inner, others, x, [mean, deviation], gamma)
    if ctx.ends_step:
        manager().update(forward=False)
    kept = of_first_bias if ctx.has_bias[0] else None
    return *found, of_first, kept, of_second, of_second_bias


_apply: Callable[..., Any] = _LayerNormMLP.apply


class LayerNormMLP(Module):
    """A norm, a linear layer, an activation and a linear layer."""

    products = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        options |= {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "return_layernorm_output_gathered": return_layernorm_output_gathered,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "ub_overlap_ag": ub_overlap_ag,
        }
        super().__init__(params_dtype, device, options)
        if activation not in (*activations.GATED, *activations.PLAIN):
            raise NotImplementedError(f"Activation type {activation} is not supported!")
        if seq_length and micro_batch_size and activation == "gelu":
            kernels.refuse("LayerNormMLP with seq_length and micro_batch_size, which warm it up")
        self.hidden_size, self.eps, self.name, self.activation = hidden_size, eps, name, activation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.adds_bias = set_parallel_mode and bias and not return_bias
        self._fuses_bias = (
            os.environ.get("NVTE_BIAS_GELU_NVFUSION", "1") != "0" and activation == "gelu"
        )
        self._make_norm(hidden_size, normalization, zero_centered_gamma)
        rows = ffn_hidden_size * (2 if activation in activations.GATED else 1)
        self.fc1_weight = nn.Parameter(self._empty(rows, hidden_size))
        self.fc1_bias = nn.Parameter(self._empty(rows)) if bias else None
        self.fc2_weight = nn.Parameter(self._empty(hidden_size, ffn_hidden_size))
        self.fc2_bias = nn.Parameter(self._empty(hidden_size)) if bias else None
        self._initialize_norm()
        (init_method or default_init())(self.fc1_weight.data)
        (output_layer_init_method or default_init())(self.fc2_weight.data)
        for each in (self.fc1_bias, self.fc2_bias):
            if each is not None:
                nn.init.zeros_(each)

    @_disable_dynamo
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply all to the last dimension."""
        # Compiled code saves other tensors in another order.
        self._fuses_bias = self._fuses_bias and manager().is_reentrant
        dtype = self.activation_dtype(inp)
        call = self.call(inp, self.hidden_size, is_first_microbatch)
        out = _apply(
            inp.contiguous(),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            None if self.return_bias or self.adds_bias else self.fc2_bias,
            self.normalization,
            self.activation,
            self._fuses_bias,
            dtype,
            call,
            self.return_layernorm_output,
        )
        return self.with_bias(out, self.fc2_bias, dtype)
