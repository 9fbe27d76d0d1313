"""Fused norms: apex/normalization/fused_layer_norm.py and _autocast_utils.py of apex 25.09.

Those without mixed types are operators of ``torch.library``, so autograd makes zeros for the
gradients of mean and deviation, which are results too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gpumem.simulated.stand_ins.apex import extensions, values
from pytest_gpumem.simulated.stand_ins.registering import register

Shape = Sequence[int]

_LAYER = extensions.FUSED_LAYER_NORM


def _layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, shape: Shape, eps: float, efficient: bool = False
) -> tuple[Tensor, ...]:
    given = input.contiguous(), weight.contiguous(), bias.contiguous()
    return tuple(extensions.layer_norm(given[0], shape, *given[1:], eps))


def _layer_norm_plain(
    input: Tensor, shape: Shape, eps: float, efficient: bool = False
) -> tuple[Tensor, ...]:
    return tuple(extensions.layer_norm(input.contiguous(), shape, None, None, eps))


def _layer_norm_gradient(
    grad: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    kept: Tensor,
    shape: Shape,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    efficient: bool = False,
) -> tuple[Tensor, ...]:
    given = grad.contiguous(), mean, invvar, kept, shape, weight, bias, eps, efficient
    return tuple(extensions.layer_norm_gradient(*given))


def _layer_norm_plain_gradient(
    grad: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    kept: Tensor,
    shape: Shape,
    eps: float,
    efficient: bool = False,
) -> Tensor:
    given = grad.contiguous(), mean, invvar, kept, shape, None, None, eps, efficient
    return extensions.layer_norm_gradient(*given)[0]


def _rms_norm(
    input: Tensor, weight: Tensor, shape: Shape, eps: float, efficient: bool = False
) -> tuple[Tensor, ...]:
    return tuple(extensions.rms_norm(input.contiguous(), shape, weight.contiguous(), eps))


def _rms_norm_plain(
    input: Tensor, shape: Shape, eps: float, efficient: bool = False
) -> tuple[Tensor, ...]:
    return tuple(extensions.rms_norm(input.contiguous(), shape, None, eps))


def _rms_norm_gradient(
    grad: Tensor,
    invvar: Tensor,
    kept: Tensor,
    shape: Shape,
    weight: Tensor,
    eps: float,
    efficient: bool = False,
) -> tuple[Tensor, ...]:
    given = grad.contiguous(), invvar, kept, shape, weight, eps, efficient
    return tuple(extensions.rms_norm_gradient(*given))


def _rms_norm_plain_gradient(
    grad: Tensor,
    invvar: Tensor,
    kept: Tensor,
    shape: Shape,
    eps: float,
    efficient: bool = False,
) -> Tensor:
    return extensions.rms_norm_gradient(
        grad.contiguous(), invvar, kept, shape, None, eps, efficient
    )[0]


_REST = "int[] normalized_shape, float eps, bool memory_efficient=False"
_AFFINE = "int[] normalized_shape, Tensor weight{bias}, float eps, bool memory_efficient=False"
_KEPT = "Tensor grad_output, {mean}Tensor invvar, Tensor input_or_output, "


def _operator(
    name: str, inputs: str, results: int, backward: str, given: int, made: int
) -> Callable[..., tuple[Tensor, ...]]:
    """Register ``apex::NAME_fwd`` and ``_bwd``; ``given`` tensors go in, gradients come out."""
    describe: Any = globals()[f"_{values.NAMES[name]}"]
    differentiate: Any = globals()[f"_{values.NAMES[name]}_gradient"]
    types = ", ".join(["Tensor"] * results)
    forward = register(
        f"apex::{name}_fwd",
        f"({inputs}{_REST}) -> ({types})",
        describe,
        values=values.forward(name),
    )
    returns = f"({', '.join(['Tensor'] * made)})" if made > 1 else "Tensor"
    gradient = register(
        f"apex::{name}_bwd",
        f"({backward}) -> {returns}",
        differentiate,
        values=values.backward(name),
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, shape, eps, efficient = inputs
        # Copies of their own, where the input was not contiguous.
        kept = [each.contiguous() for each in tensors]
        out, *sums = output
        if efficient:
            kept[0] = out
            sums[:-1] = [None] * (len(sums) - 1)  # type: ignore[list-item]  # the mean goes
        ctx.save_for_backward(*kept, *sums)
        ctx.rest = shape, eps, efficient

    def differentiated(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors[:given]
        sums = ctx.saved_tensors[given:]
        shape, eps, efficient = ctx.rest
        found = gradient(grad, *sums, kept, shape, *weights, eps, efficient)
        return *(found if isinstance(found, tuple) else (found,)), None, None, None

    forward.register_autograd(differentiated, setup_context=keep)
    return forward  # type: ignore[no-any-return]  # a custom operator


_OPERATORS = {
    "fused_layer_norm_affine": _operator(
        "fused_layer_norm_affine",
        "Tensor input, Tensor weight, Tensor bias, ",
        3,
        _KEPT.format(mean="Tensor? mean, ") + _AFFINE.format(bias=", Tensor bias"),
        3,
        3,
    ),
    "fused_layer_norm": _operator(
        "fused_layer_norm", "Tensor input, ", 3, _KEPT.format(mean="Tensor? mean, ") + _REST, 1, 1
    ),
    "fused_rms_norm_affine": _operator(
        "fused_rms_norm_affine",
        "Tensor input, Tensor weight, ",
        2,
        _KEPT.format(mean="") + _AFFINE.format(bias=""),
        2,
        2,
    ),
    "fused_rms_norm": _operator(
        "fused_rms_norm", "Tensor input, ", 2, _KEPT.format(mean="") + _REST, 1, 1
    ),
}


class _Mixed(torch.autograd.Function):
    """Norms whose output has the weight's type: kernels without an operator."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        shape: Shape,
        eps: float,
        efficient: bool,
        *tensors: Tensor,
    ) -> Tensor:
        """Normalize."""
        kept = [each.contiguous() for each in tensors]
        kernel = _LAYER[f"{kind}forward_affine_mixed_dtypes"]
        output, *sums = kernel(kept[0], shape, *kept[1:], eps)
        if efficient:
            kept[0] = output
            sums[:-1] = [None] * (len(sums) - 1)
        ctx.save_for_backward(*kept, *sums)
        ctx.count, ctx.rest = len(kept), (kind, shape, eps, efficient)
        made: Tensor = output
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of the input, weight and bias."""
        kept, *weights = ctx.saved_tensors[: ctx.count]
        kind, shape, eps, efficient = ctx.rest
        made = _LAYER[f"{kind}backward_affine"](
            grads[0].contiguous(), *ctx.saved_tensors[ctx.count :], kept, shape, *weights, eps,
            efficient,
        )  # fmt: skip
        return None, None, None, None, *made


_mix: Callable[..., Tensor] = _Mixed.apply


def _cast(*args: Any) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled():
        return args
    dtype = torch.get_autocast_dtype("cuda")
    made: tuple[Any, ...] = torch.amp.autocast_mode._cast(args, "cuda", dtype)
    return made


def _plain(name: str) -> Callable[..., Tensor]:
    def call(*args: Any, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
        given = _cast(*args, eps, memory_efficient)
        with torch.amp.autocast("cuda", enabled=False):
            return _OPERATORS[name](*given)[0]

    return call


_PLAIN = {name: _plain(name) for name in _OPERATORS}


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalize the last dimensions, ``normalized_shape``, and scale and shift them."""
    call = _PLAIN["fused_layer_norm_affine"]
    given = input, weight, bias, normalized_shape
    return call(*given, eps=eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Normalize the last dimensions."""
    call = _PLAIN["fused_layer_norm"]
    return call(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Divide the last dimensions by the root of their mean square, and scale them."""
    call = _PLAIN["fused_rms_norm_affine"]
    return call(input, weight, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Divide the last dimensions by the root of their mean square."""
    call = _PLAIN["fused_rms_norm"]
    return call(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``fused_layer_norm_affine`` with an output of the weight's type."""
    given = _cast(normalized_shape, eps, memory_efficient, input, weight, bias)
    with torch.amp.autocast("cuda", enabled=False):
        return _mix("", *given)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``fused_rms_norm_affine`` with an output of the weight's type."""
    given = _cast(normalized_shape, eps, memory_efficient, input, weight)
    with torch.amp.autocast("cuda", enabled=False):
        return _mix("rms_", *given)


class _Norm(nn.Module):
    normalized_shape: tuple[int, ...]

    def __init__(
        self,
        normalized_shape: int | Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        alone = isinstance(normalized_shape, Integral)
        self.normalized_shape = torch.Size(
            (normalized_shape,) if alone else normalized_shape  # type: ignore[arg-type]  # one of two
        )
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._names:
            made = nn.Parameter(torch.empty(*self.normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, made)
        self.reset_parameters()

    _names: tuple[str, ...] = ()

    def reset_parameters(self) -> None:
        """Weights are ones, biases zeros."""
        for name in self._names if self.elementwise_affine else ():
            (nn.init.ones_ if name == "weight" else nn.init.zeros_)(getattr(self, name))

    def extra_repr(self) -> str:
        """As the library writes it."""
        return "{normalized_shape}, eps={eps}, elementwise_affine={elementwise_affine}".format(
            **self.__dict__
        )

    def _weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names if self.elementwise_affine]

    def _call(self, norm: Callable[..., Tensor], input: Tensor, weights: list[Tensor]) -> Tensor:
        options = {"eps": self.eps, "memory_efficient": self.memory_efficient}
        return norm(input, *weights, self.normalized_shape, **options)


class FusedLayerNorm(_Norm):
    """A layer norm."""

    _names = ("weight", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize."""
        weights = self._weights()
        if not input.is_cuda or torch.compiler.is_compiling():
            weight, bias = weights or (None, None)
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        name = "fused_layer_norm_affine" if weights else "fused_layer_norm"
        return self._call(_PLAIN[name], input, weights)


class FusedRMSNorm(_Norm):
    """A norm by the root of mean squares."""

    _names = ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize."""
        weights = self._weights()
        if not input.is_cuda or torch.compiler.is_compiling():
            return values.manual_rms_norm(input, self.normalized_shape, weights, self.eps)
        name = "fused_rms_norm_affine" if weights else "fused_rms_norm"
        return self._call(_PLAIN[name], input, weights)


def _mixed_options(name: str, options: dict[str, Any]) -> None:
    if "elementwise_affine" not in options:
        return
    warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=3)
    if not options.pop("elementwise_affine"):
        raise RuntimeError(f"{name} does not support `elementwise_affine = False`")


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose output has the weight's type."""

    def __init__(
        self,
        normalized_shape: int | Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **options: Any,
    ) -> None:
        _mixed_options("MixedFusedLayerNorm", options)
        super().__init__(normalized_shape, eps, True, memory_efficient, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize."""
        if not input.is_cuda or torch.compiler.is_compiling():
            return super().forward(input)
        weight, bias = self._weights()
        return mixed_dtype_fused_layer_norm_affine(
            input, weight, bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """A norm by the root of mean squares whose output has the weight's type."""

    def __init__(
        self,
        normalized_shape: int | Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **options: Any,
    ) -> None:
        _mixed_options("MixedFusedRMSNorm", options)
        super().__init__(normalized_shape, eps, True, memory_efficient, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize."""
        if not input.is_cuda or torch.compiler.is_compiling():
            return super().forward(input)
        (weight,) = self._weights()
        return mixed_dtype_fused_rms_norm_affine(
            input, weight, self.normalized_shape, self.eps, self.memory_efficient
        )
