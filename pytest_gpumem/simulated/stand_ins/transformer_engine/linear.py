"""``Linear`` and ``LayerNormLinear``: transformer_engine/pytorch/module/linear.py,
layernorm_linear.py and base.py of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pytest_gpumem.simulated.stand_ins.transformer_engine import kernels
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import (
    ModuleState,
    Quantized,
    check_shapes,
    manager,
    normalize_to_fp8,
    quantize,
    quantize_with_bias,
    quantized,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import cast, clear, gemm

Init = Callable[[Tensor], Any]
_DEFAULTS: dict[str, Any] = {
    "delay_wgrad_compute": False,
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "parameters_split": None,
    "return_layernorm_output": False,
    "return_layernorm_output_gathered": False,
    "rng_tracker_name": None,
    "save_original_input": False,
    "sequence_parallel": False,
    "symmetric_ar_type": None,
    "tp_group": None,
    "tp_size": 1,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
}
"""Options that have no stand-in, and what leaves them out."""


def _only_defaults(module: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise TypeError(f"{module}.__init__() got an unexpected keyword argument '{name}'")
        if value != _DEFAULTS[name]:
            kernels.refuse(f"{module}({name}={value!r})")


class Call(NamedTuple):
    """How a module is called."""

    state: ModuleState | None
    """For fp8, if it is on."""
    differentiable: bool
    first: bool | None
    """Whether it is the first microbatch of a step, if there are any."""

    def ends_step(self, *tensors: Tensor | None) -> bool:
        """Whether the backward pass updates all scales."""
        if not self.differentiable or not any(
            each is not None and each.requires_grad for each in tensors
        ):
            return False
        return manager().take_first()


def narrow_bias(dtype: torch.dtype) -> torch.dtype:
    """cuBLAS has no product of fp8 with a bias of float32."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _in_fp8(ctx: Any, grad: Tensor) -> tuple[Quantized, Tensor | None]:
    """grad_output_preprocess(): the gradient in fp8, and that of the bias."""
    if ctx.has_bias:
        of_bias, found = quantize_with_bias(grad)
        return found, of_bias
    return quantize(grad, transposed=ctx.needs[1]), None


def _restored(tensors: Sequence[Any]) -> Quantized:
    return Quantized(tensors[0], tensors[2], tensors[1])


def _two_dimensional(grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
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
                ctx.save_for_backward(*kept, *given.saved())
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
        """Make gradients of input, weight and bias."""
        grad = _two_dimensional(grads[0])
        of_input = of_weight = of_bias = None
        if ctx.is_fp8:
            narrow, of_bias = _in_fp8(ctx, grad)
            x, weight = _restored(ctx.saved_tensors[:3]), _restored(ctx.saved_tensors[3:])
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
        return found, of_weight, of_bias, None, None


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
    ) -> Tensor:
        """Normalize and multiply."""
        needed = call.differentiable and weight.requires_grad
        ctx.shape, ctx.dtype, ctx.norm, ctx.has_bias = input.shape, dtype, norm, bias is not None
        ctx.needs = input.requires_grad, needed
        ctx.is_fp8 = call.state is not None
        flat = input.view(-1, input.shape[-1])
        if call.state is not None:
            check_shapes(flat, weight)
        x = cast(flat, dtype)
        gamma = cast(gamma, dtype)
        beta = None if beta is None else cast(beta, dtype)
        if call.state is not None:
            made, mean, deviation = normalize_to_fp8(norm, x, gamma, beta, needed)
            narrow = quantized(made)
            del made
            given = call.state.weight(weight, transposed=call.differentiable, first=call.first)
            bias = None if bias is None else cast(bias, narrow_bias(dtype))
            out, _ = gemm(given.data, narrow.data, dtype, bias=bias)
            if needed:
                narrow.data = None
            elif not weight.requires_grad:
                narrow.clear()
            if call.differentiable:
                kept = narrow.saved() if needed else (None, None, None)
                ctx.save_for_backward(x, *given.saved(), gamma, *kept, mean, deviation)
            ctx.ends_step = call.ends_step(input, gamma, beta, weight, bias)
        else:
            normal, mean, deviation = kernels.normalize(norm, x, gamma, beta)
            wide = cast(weight, dtype)
            bias = None if bias is None else cast(bias, dtype)
            out, _ = gemm(wide, normal, dtype, bias=bias)
            if not weight.requires_grad:
                clear(normal)
            between = normal if needed else None
            ctx.save_for_backward(x, wide, bias, gamma, between, mean, deviation)
        shaped: Tensor = out.view(-1, *input.shape[1:-1], weight.shape[0])
        return shaped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of all that was given."""
        grad = _two_dimensional(grads[0])
        x, *rest, mean, deviation = ctx.saved_tensors
        of_weight = of_bias = None
        # The library, too, keeps a name for the product until it returns.
        if ctx.is_fp8:
            narrow, of_bias = _in_fp8(ctx, grad)
            gamma = rest[3]
            weight, between = _restored(rest[:3]), _restored(rest[4:])
            product, _ = gemm(weight.data, narrow.data, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                upright = between.upright
                of_weight, _ = gemm(upright, narrow.data, ctx.dtype, layout="NT", grad=True)
                del upright
                between.clear()
        else:
            wide, bias, gamma, normal = rest
            product, _ = gemm(wide, grad, ctx.dtype, layout="NN", grad=True)
            if ctx.needs[1]:
                of_weight, of_bias = gemm(
                    normal, grad, ctx.dtype, layout="NT", bias=bias, grad=True
                )
                clear(normal)
        inner, of_gamma, of_beta = kernels.differentiate_norm(
            ctx.norm, product.view(x.shape), x, mean, deviation, gamma
        )
        clear(*(() if mean is None else (mean,)), deviation)
        if ctx.is_fp8 and ctx.ends_step:
            manager().update(forward=False)
        found = inner.view(ctx.shape) if ctx.needs[0] else None
        return found, of_gamma, of_beta, of_weight, of_bias, None, None, None


_linear: Callable[..., Tensor] = _Linear.apply
_normalized_linear: Callable[..., Tensor] = _LayerNormLinear.apply


class _Module(nn.Module):
    """TransformerEngineBaseModule, and what its modules with one weight have in common."""

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
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        _only_defaults(kind, options)
        if parallel_mode not in (None, "row", "column"):
            raise AssertionError(f"parallel_mode {parallel_mode} not supported")
        if str(device) == "meta":
            kernels.refuse(f"{kind}(device='meta')")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.adds_bias = parallel_mode == "row" and bias and not return_bias
        self.dtype = params_dtype or torch.get_default_dtype()
        self.where = device
        self._fp8 = ModuleState()
        self._make_first()
        weight = torch.empty(out_features, in_features, device=device, dtype=self.dtype)
        empty = torch.empty(out_features, device=device, dtype=self.dtype) if bias else None
        self.weight = nn.Parameter(weight)
        self.bias = None if empty is None else nn.Parameter(empty)
        initialize = init_method or partial(nn.init.normal_, mean=0.0, std=0.023)
        initialize(self.weight.data)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _make_first(self) -> None:
        """Make the parameters that come before the weight."""

    def _activation_dtype(self, input: Tensor) -> torch.dtype:
        """set_activation_dtype()."""
        if not input.is_cuda:
            raise AssertionError("TransformerEngine needs CUDA.")
        if torch.is_autocast_enabled("cuda"):
            return torch.get_autocast_dtype("cuda")
        for name, parameter in self.named_parameters():
            if parameter.dtype != input.dtype:
                raise AssertionError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f" Found input dtype: {input.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        return input.dtype

    def _refuse_narrow(self, **options: bool) -> None:
        for name, value in options.items():
            if value:
                kernels.refuse(f"{type(self).__name__} with {name}=True")

    def _call(self, input: Tensor, first: bool | None) -> Call:
        if input.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        state = self._fp8 if self._fp8.prepare() else None
        return Call(state, torch.is_grad_enabled(), first)

    def _given_bias(self) -> Tensor | None:
        return None if self.return_bias or self.adds_bias else self.bias

    def _with_bias(self, out: Tensor, dtype: torch.dtype) -> Any:
        if self.adds_bias and self.bias is not None:
            out = out + cast(self.bias, dtype)
        if self.return_bias:
            empty = torch.empty(0, device=out.device, dtype=dtype)
            return out, empty if self.bias is None else cast(self.bias, dtype)
        return out


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
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, return_bias, parallel_mode, params_dtype, device,
            init_method, options,
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
        dtype = self._activation_dtype(inp)
        call = self._call(inp, is_first_microbatch)
        out = _linear(inp.contiguous(), self.weight, self._given_bias(), dtype, call)
        return self._with_bias(out, dtype)


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
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        init_method: Init | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise AssertionError("Unsupported normalization type!")
        self._kind, self._centered = normalization, zero_centered_gamma
        super().__init__(
            in_features, out_features, bias, return_bias, parallel_mode, params_dtype, device,
            init_method, options,
        )  # fmt: skip
        self.eps, self.name = eps, name

    def _make_first(self) -> None:
        self.normalization, self.zero_centered_gamma = self._kind, self._centered
        made = torch.empty(self.in_features, device=self.where, dtype=self.dtype)
        self.layer_norm_weight = nn.Parameter(made)
        self.layer_norm_bias = None
        if self.normalization == "LayerNorm":
            made = torch.empty(self.in_features, device=self.where, dtype=self.dtype)
            self.layer_norm_bias = nn.Parameter(made)
            nn.init.zeros_(self.layer_norm_bias)
        (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.layer_norm_weight)

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
        dtype = self._activation_dtype(inp)
        call = self._call(inp, is_first_microbatch)
        out = _normalized_linear(
            inp.contiguous(),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self._given_bias(),
            self.normalization,
            dtype,
            call,
        )
        return self._with_bias(out, dtype)
