"""``Linear`` and ``LayerNormLinear``: transformer_engine/pytorch/module/linear.py,
layernorm_linear.py of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pytest_gpumem.simulated.stand_ins.transformer_engine import kernels
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import (
    Call,
    Init,
    Module,
    default_init,
    in_fp8,
    joined,
    narrow_bias,
    restored,
    two_dimensional,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import (
    check_shapes,
    manager,
    normalize_to_fp8,
    quantize,
    quantized,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import cast, clear, gemm

Split = dict[str, int] | Sequence[str] | None
"""Parameters that are one weight: names with rows of each, or names of equal parts."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        input: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        call: Call,
    ) -> Tensor:
        """Multiply."""
        needed = call.differentiable and weight.requires_grad
        ctx.shape, ctx.dtype, ctx.has_bias = input.shape, dtype, bias is not None
        ctx.needs = input.requires_grad, needed
        ctx.is_fp8 = call.state is not None
        if call.state is not None:
            check_shapes(input, weight)
            narrow = quantize(input, transposed=needed)
            transposed = call.differentiable and input.requires_grad
            given = call.state.weight(weight, transposed=transposed, first=call.first)
            bias = None if bias is None else cast(bias, narrow_bias(dtype))
            out, _ = gemm(given.data, narrow.data, dtype, bias=bias)
            if needed:
                narrow.data = None
            if call.differentiable:
                kept = narrow.saved() if needed else (None, None, None)
                ctx.save_for_backward(*kept, *given.saved(), bias)
            ctx.ends_step = call.ends_step(input, weight, bias)
            return out
        x = cast(input, dtype)
        wide = cast(weight, dtype)
        bias = None if bias is None else cast(bias, dtype)
        out, _ = gemm(wide, x, dtype, bias=bias)
        ctx.save_for_backward(x if needed else None, wide, bias)
        ctx.owns_input = x is not input
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of weight, input and bias."""
        grad = two_dimensional(grads[0])
        of_input = of_weight = of_bias = None
        if ctx.is_fp8:
            narrow, of_bias = in_fp8(grad, has_bias=ctx.has_bias, transposed=ctx.needs[1])
            x, weight = restored(ctx.saved_tensors[:3]), restored(ctx.saved_tensors[3:6])
            if ctx.needs[0]:
                of_input, _ = gemm(weight.data, narrow.data, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                of_weight, _ = gemm(x.upright, narrow.data, ctx.dtype, layout="NT", grad=True)
                x.clear()
            if ctx.ends_step:
                manager().update(forward=False)
        else:
            given, wide, bias = ctx.saved_tensors
            if ctx.needs[0]:
                of_input, _ = gemm(wide, grad, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                of_weight, of_bias = gemm(given, grad, ctx.dtype, layout="NT", bias=bias, grad=True)
                if ctx.owns_input:
                    clear(given)
        found = None if of_input is None else of_input.view(ctx.shape)
        return of_weight, found, of_bias, None, None


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: str,
        dtype: torch.dtype,
        call: Call,
        returned: bool,
    ) -> Any:
        """Normalize and multiply."""
        needed = call.differentiable and weight.requires_grad
        ctx.shape, ctx.dtype, ctx.norm, ctx.has_bias = input.shape, dtype, norm, bias is not None
        ctx.needs = input.requires_grad, needed
        ctx.is_fp8, ctx.returned, normal = call.state is not None, returned, None
        flat = input.view(-1, input.shape[-1])
        if call.state is not None:
            check_shapes(flat, weight)
        x = cast(flat, dtype)
        gamma = cast(gamma, dtype)
        beta = None if beta is None else cast(beta, dtype)
        if call.state is not None:
            if returned:
                normal, mean, deviation = kernels.normalize(norm, x, gamma, beta)
                narrow = quantize(normal, transposed=needed)
            else:
                made, mean, deviation = normalize_to_fp8(norm, x, gamma, beta, needed)
                narrow = quantized(made)
                del made
            given = call.state.weight(weight, transposed=call.differentiable, first=call.first)
            bias = None if bias is None else cast(bias, narrow_bias(dtype))
            out, _ = gemm(given.data, narrow.data, dtype, bias=bias)
            if needed:
                narrow.data = None
            elif not weight.requires_grad and not returned:
                narrow.clear()
            if call.differentiable:
                kept = narrow.saved() if needed else (None, None, None)
                ctx.save_for_backward(x, *given.saved(), bias, gamma, *kept, mean, deviation)
            ctx.ends_step = call.ends_step(input, gamma, beta, weight, bias)
        else:
            normal, mean, deviation = kernels.normalize(norm, x, gamma, beta)
            wide = cast(weight, dtype)
            bias = None if bias is None else cast(bias, dtype)
            out, _ = gemm(wide, normal, dtype, bias=bias)
            if not weight.requires_grad and not returned:
                clear(normal)
            between = normal if needed else None
            ctx.save_for_backward(x, wide, bias, gamma, between, mean, deviation)
        shaped = out.view(-1, *input.shape[1:-1], weight.shape[0])
        return shaped if normal is None or not returned else (shaped, normal.view(input.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of all that was given."""
        grad = two_dimensional(grads[0])
        x, *rest, mean, deviation = ctx.saved_tensors
        of_weight = of_bias = None
        # The library, too, keeps a name for the product until it returns.
        if ctx.is_fp8:
            narrow, of_bias = in_fp8(grad, has_bias=ctx.has_bias, transposed=ctx.needs[1])
            gamma = rest[4]
            weight, between = restored(rest[:3]), restored(rest[5:])
            product, _ = gemm(weight.data, narrow.data, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                upright = between.upright
                of_weight, _ = gemm(upright, narrow.data, ctx.dtype, layout="NT", grad=True)
                del upright
                if not ctx.returned:
                    between.clear()
        else:
            wide, bias, gamma, normal = rest
            product, _ = gemm(wide, grad, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                of_weight, of_bias = gemm(
                    normal, grad, ctx.dtype, layout="NT", bias=bias, grad=True
                )
                if not ctx.returned:
                    clear(normal)
        inner = product.view(x.shape)
        if ctx.returned:
            inner = inner + grads[1].view_as(inner)
        inner, of_gamma, of_beta = kernels.differentiate_norm(
            ctx.norm, inner, x, mean, deviation, gamma
        )
        clear(*(() if mean is None else (mean,)), deviation)
        if ctx.is_fp8 and ctx.ends_step:
            manager().update(forward=False)
        found = inner.view(ctx.shape) if ctx.needs[0] else None
        return found, of_gamma, of_beta, of_weight, of_bias, None, None, None, None


_linear: Callable[..., Tensor] = _Linear.apply
_normalized_linear: Callable[..., Any] = _LayerNormLinear.apply


class _Module(Module):
    """A module with one weight, which may be registered in parts."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype | None,
        device: Any,
        init_method: Init | None,
        parameters_split: Split,
        options: dict[str, Any],
    ) -> None:
        super().__init__(params_dtype, device, options)
        if parallel_mode not in (None, "row", "column"):
            raise AssertionError(f"parallel_mode {parallel_mode} not supported")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.adds_bias = parallel_mode == "row" and bias and not return_bias
        self._make_first()
        parts = _parts(parameters_split, out_features)
        self.weight_names = [f"{name}weight" for name in parts]
        self.bias_names = [f"{name}bias" for name in parts]
        weight = self._empty(out_features, in_features)
        empty = self._empty(out_features) if bias else None
        sizes = list(parts.values())
        for name, part in zip(self.weight_names, weight.split(sizes), strict=True):
            self.register_parameter(name, nn.Parameter(part))
        for name, part in zip(
            self.bias_names, empty.split(sizes) if empty is not None else sizes, strict=True
        ):
            made = nn.Parameter(part) if isinstance(part, Tensor) else None
            self.register_parameter(name, made)
        initialize = init_method or default_init()
        for name in self.weight_names:
            initialize(getattr(self, name).data)
        for name in self.bias_names if bias else ():
            nn.init.zeros_(getattr(self, name))

    def _make_first(self) -> None:
        """Make the parameters that come before the weight."""

    def _refuse_narrow(self, **options: bool) -> None:
        for name, value in options.items():
            if value:
                kernels.refuse(f"{type(self).__name__} with {name}=True")

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        """_get_weight_and_bias_tensors()."""
        weight = joined([getattr(self, name) for name in self.weight_names])
        biases = [getattr(self, name) for name in self.bias_names]
        return weight, joined(biases) if self.use_bias else None

    def _given(self, bias: Tensor | None) -> Tensor | None:
        return None if self.return_bias or self.adds_bias else bias


def _parts(split: Split, features: int) -> dict[str, int]:
    """Rows of each parameter, by the prefix of its name."""
    if split is None:
        return {"": features}
    if not split:
        raise ValueError("Cannot split weight buffer into 0 parameters")
    sizes = split if isinstance(split, dict) else dict.fromkeys(split, features // len(split))
    if sum(sizes.values()) != features:
        raise ValueError(
            f"Trying to split weight buffer (out_features={features}) "
            f"with split sizes {list(sizes.values())}"
        )
    return {f"{name.rstrip('_')}_": size for name, size in sizes.items()}


class Linear(_Module):
    """A linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        init_method: Init | None = None,
        parameters_split: Split = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, return_bias, parallel_mode, params_dtype, device,
            init_method, parameters_split, options,
        )  # fmt: skip
        self.name = name

    @_disable_dynamo
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Multiply the last dimension."""
        self._refuse_narrow(fp8_output=fp8_output, fp8_grad=fp8_grad)
        dtype = self.activation_dtype(inp)
        call = self.call(inp, self.in_features, is_first_microbatch)
        inp = inp.contiguous()
        weight, bias = self._joined()
        out = _linear(weight, inp, self._given(bias), dtype, call)
        return self.with_bias(out, bias, dtype)


class LayerNormLinear(_Module):
    """A norm, and a linear layer after it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        init_method: Init | None = None,
        parameters_split: Split = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self._kind = normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        super().__init__(
            in_features, out_features, bias, return_bias, parallel_mode, params_dtype, device,
            init_method, parameters_split, options,
        )  # fmt: skip
        self.eps, self.name = eps, name

    def _make_first(self) -> None:
        self._make_norm(self.in_features, *self._kind)
        self._initialize_norm()

    @_disable_dynamo
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Normalize and multiply the last dimension."""
        self._refuse_narrow(fp8_output=fp8_output, fp8_grad=fp8_grad)
        dtype = self.activation_dtype(inp)
        call = self.call(inp, self.in_features, is_first_microbatch)
        inp = inp.contiguous()
        weight, bias = self._joined()
        out = _normalized_linear(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            weight,
            self._given(bias),
            self.normalization,
            dtype,
            call,
            self.return_layernorm_output,
        )
        return self.with_bias(out, bias, dtype)
