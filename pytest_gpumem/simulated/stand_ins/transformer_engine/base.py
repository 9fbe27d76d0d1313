"""What transformer-engine's modules with weights have in common.

Source: transformer_engine/pytorch/module/base.py and _common.py (``noop_cat``) of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.stand_ins.transformer_engine import kernels
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import (
    ModuleState,
    Quantized,
    manager,
    quantize,
    quantize_with_bias,
)

Init = Callable[[Tensor], Any]
_DEFAULTS: Mapping[str, Any] = {
    "delay_wgrad_compute": False,
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
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


def only_defaults(
    module: str, options: Mapping[str, Any], defaults: Mapping[str, Any] = _DEFAULTS
) -> None:
    """Refuse options that have no stand-in."""
    for name, value in options.items():
        if name not in defaults:
            raise TypeError(f"{module}.__init__() got an unexpected keyword argument '{name}'")
        if value != defaults[name]:
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


def in_fp8(
    grad: Tensor, *, has_bias: bool, transposed: bool = True
) -> tuple[Quantized, Tensor | None]:
    """grad_output_preprocess(): the gradient in fp8, and that of the bias."""
    if has_bias:
        of_bias, found = quantize_with_bias(grad)
        return found, of_bias
    return quantize(grad, transposed=transposed), None


def restored(tensors: Sequence[Any]) -> Quantized:
    """restore_from_saved() of one tensor in fp8."""
    return Quantized(tensors[0], tensors[2], tensors[1])


def two_dimensional(grad: Tensor) -> Tensor:
    """The gradient of a batch as rows."""
    return grad.reshape(-1, grad.shape[-1]).contiguous()


class _Joining(torch.autograd.Function):
    """_NoopCatFunc."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Join tensors that lie behind each other by their memory, others by a copy."""
        ctx.rows = [len(each) for each in tensors]
        one = tensors[0]
        expected = one.data_ptr()
        for each in tensors:
            if each.data_ptr() != expected or each.stride() != one.stride():
                return torch.cat(tensors)
            expected += each.numel() * each.element_size()
        shape = sum(ctx.rows), *one.shape[1:]
        joined = one.new()
        joined.set_(one.untyped_storage(), int(one.storage_offset()), shape, one.stride())
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Split the gradient, whose parts share its memory."""
        return grads[0].split(ctx.rows)


_join: Callable[..., Tensor] = _Joining.apply


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """noop_cat(): parameters that are one weight."""
    return tensors[0] if len(tensors) == 1 else _join(*tensors)


class Module(nn.Module):
    """TransformerEngineBaseModule."""

    products = 1
    """Whose tensors have scales of their own."""
    return_bias = adds_bias = False

    def __init__(
        self, params_dtype: torch.dtype | None, device: Any, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        only_defaults(kind, options)
        if str(device) == "meta":
            kernels.refuse(f"{kind}(device='meta')")
        self.dtype = params_dtype or torch.get_default_dtype()
        self.where = device
        self._fp8 = ModuleState()

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.where, dtype=self.dtype)

    def _make_norm(self, features: int, kind: str, centered: bool) -> None:
        """Make the parameters of a norm before the first product."""
        if kind not in ("LayerNorm", "RMSNorm"):
            raise AssertionError("Unsupported normalization type!")
        self.normalization, self.zero_centered_gamma = kind, centered
        self.layer_norm_weight = nn.Parameter(self._empty(features))
        self.layer_norm_bias = None
        if kind == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(self._empty(features))

    def _initialize_norm(self) -> None:
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.layer_norm_weight)

    def activation_dtype(self, input: Tensor) -> torch.dtype:
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

    def call(self, input: Tensor, features: int, first: bool | None) -> Call:
        """prepare_forward(), for an input of ``features`` columns."""
        if input.shape[-1] != features:
            raise AssertionError("GEMM not possible")
        state = self._fp8 if self._fp8.prepare(self.products) else None
        return Call(state, torch.is_grad_enabled(), first)

    def with_bias(self, out: Any, bias: Tensor | None, dtype: torch.dtype) -> Any:
        """Add the bias, or return it beside ``out`` and before a norm's output."""
        out, *normal = out if isinstance(out, tuple) else (out,)
        if self.adds_bias and bias is not None:
            out = out + kernels.cast(bias, dtype)
        returned = [out]
        if self.return_bias:
            empty = torch.empty(0, device=out.device, dtype=dtype)
            returned.append(empty if bias is None else kernels.cast(bias, dtype))
        returned += normal
        return tuple(returned) if returned[1:] else out


def default_init() -> Init:
    """get_default_init_method()."""
    return partial(nn.init.normal_, mean=0.0, std=0.023)
