"""``Linear`` and ``LayerNormLinear``: transformer_engine/pytorch/module/linear.py,
layernorm_linear.py and base.py of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.stand_ins.transformer_engine import kernels
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


def _weight_gradient(ctx: Any, x: Tensor, grad: Tensor, bias: Tensor | None) -> Any:
    return gemm(x, grad, ctx.dtype, layout="NT", bias=bias, grad=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Multiply."""
        if input.shape[-1] != weight.shape[1]:
            raise AssertionError("GEMM not possible")
        kept = cast(input, dtype)
        given = cast(weight, dtype)
        bias = None if bias is None else cast(bias, dtype)
        out, _ = gemm(given, kept, dtype, bias=bias)
        needed = weight.requires_grad
        ctx.save_for_backward(kept if needed else None, given, bias)
        ctx.shape, ctx.dtype, ctx.owns_input = input.shape, dtype, kept is not input
        ctx.needs = input.requires_grad, needed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of input, weight and bias."""
        x, weight, bias = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        of_input = of_weight = of_bias = None
        if ctx.needs[0]:
            of_input, _ = gemm(weight, grad, ctx.dtype, layout="NN", grad=True)
        if ctx.needs[1]:
            of_weight, of_bias = _weight_gradient(ctx, x.view(-1, x.shape[-1]), grad, bias)
            if ctx.owns_input:
                clear(x)
        found = None if of_input is None else of_input.view(ctx.shape)
        return found, of_weight, of_bias, None


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
    ) -> Tensor:
        """Normalize and multiply."""
        if input.shape[-1] != weight.shape[1]:
            raise AssertionError("GEMM not possible")
        x = cast(input.view(-1, input.shape[-1]), dtype)
        gamma = cast(gamma, dtype)
        beta = None if beta is None else cast(beta, dtype)
        normal, mean, deviation = kernels.normalize(norm, x, gamma, beta)
        given = cast(weight, dtype)
        bias = None if bias is None else cast(bias, dtype)
        out, _ = gemm(given, normal, dtype, bias=bias)
        needed = weight.requires_grad
        if not needed:
            clear(normal)
        ctx.save_for_backward(x, given, bias, gamma, normal if needed else None, mean, deviation)
        ctx.shape, ctx.dtype, ctx.norm = input.shape, dtype, norm
        ctx.needs = input.requires_grad, needed
        made: Tensor = out.view(-1, *input.shape[1:-1], weight.shape[0])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of all that was given."""
        x, weight, bias, gamma, normal, mean, deviation = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        # The library, too, keeps a name for the product until it returns.
        product, _ = gemm(weight, grad, ctx.dtype, layout="NN", grad=True)
        of_weight = of_bias = None
        if ctx.needs[1]:
            of_weight, of_bias = _weight_gradient(ctx, normal, grad, bias)
            clear(normal)
        inner, of_gamma, of_beta = kernels.differentiate_norm(
            ctx.norm, product.view(x.shape), x, mean, deviation, gamma
        )
        clear(*(() if mean is None else (mean,)), deviation)
        found = inner.view(ctx.shape) if ctx.needs[0] else None
        return found, of_gamma, of_beta, of_weight, of_bias, None, None


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

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Multiply the last dimension."""
        dtype = self._activation_dtype(inp)
        out = _linear(inp.contiguous(), self.weight, self._given_bias(), dtype)
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

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Normalize and multiply the last dimension."""
        dtype = self._activation_dtype(inp)
        out = _normalized_linear(
            inp.contiguous(),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self._given_bias(),
            self.normalization,
            dtype,
        )
        return self._with_bias(out, dtype)
