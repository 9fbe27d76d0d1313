"""causal-conv1d 1.7.0: what its functions allocate.

Source: causal_conv1d/causal_conv1d_interface.py, cpp_functions.py and causal_conv1d_varlen.py, and
csrc/causal_conv1d.cpp (causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem.simulated.operators.described import simulate_operator
from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES
from pytest_gpumem.simulated.stand_ins.registering import register
from pytest_gpumem.simulated.stand_ins.usage import used

_LIBRARY = LIBRARIES["causal-conv1d"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _is_channel_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) > 1


def _check(x: Tensor, weight: Tensor) -> None:
    used(_LIBRARY.name)
    _require(x.is_cuda and weight.is_cuda, "Expected x.is_cuda() to be true, but got false.")
    _require(2 <= weight.shape[-1] <= 4, "causal_conv1d only supports width between 2 and 4")


def _check_layout(x: Tensor) -> None:
    _require(1 in (x.stride(1), x.stride(2)), "x.stride(2) == 1 || x.stride(1) == 1")
    if _is_channel_last(x):
        _require(
            x.shape[1] % 8 == 0,
            "causal_conv1d only supports channel dimension divisible by 8 for now",
        )
        _require(
            x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0,
            "causal_conv1d with channel last layout requires strides (x.stride(0) and "
            "x.stride(2)) to be multiples of 8",
        )


def _fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    out: Tensor,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> None:
    _check(x, weight)
    _check_layout(x)
    _require(
        seq_idx is None or _is_channel_last(x), "seq_idx is only supported for channel last layout"
    )


def _bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    dinitial_states: Tensor | None,
    silu_activation: bool,
) -> None:
    _check(x, weight)
    _check_layout(x)
    last = _is_channel_last(x)
    if not last and dout.stride(2) != 1:
        dout = dout.contiguous()
    elif last and dout.stride(1) != 1:
        dout = dout.transpose(-1, -2).contiguous().transpose(-1, -2)
    if not _is_deterministic():
        return
    batch, dim, length = x.shape
    parts = [batch]
    if last:
        parts.append(-(-length // (64 if length <= 128 else 128)))
    over = list(range(len(parts)))
    of_weight = x.new_zeros((*parts, dim, weight.shape[-1]), dtype=torch.float32)
    of_bias = None if dbias is None else x.new_zeros((*parts, dim), dtype=torch.float32)
    dweight.add_(of_weight.sum(over))
    if dbias is not None and of_bias is not None:
        dbias.add_(of_bias.sum(over))
    del of_bias, of_weight


def _is_deterministic() -> bool:
    """use_deterministic_mode."""
    told = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
    return told == "1" or (told != "0" and torch.are_deterministic_algorithms_enabled())


def _update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> None:
    _check(x, weight)
    _require(conv_state.shape[2] >= weight.shape[-1] - 1, "conv_state_len >= width - 1")


# What they compute, on the CPU and in float32: for tests that read values.


def _padded(x: Tensor, weight: Tensor, initial_states: Tensor | None) -> Tensor:
    before = weight.shape[-1] - 1
    if initial_states is None:
        return functional.pad(x.float(), (before, 0))
    return torch.cat([initial_states.float(), x.float()], -1)


def _convolved(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = None if bias is None else bias.float()
    return functional.conv1d(padded, weight.float()[:, None], wide, groups=weight.shape[0])


def _fwd_values(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    out: Tensor,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> None:
    if seq_idx is not None:
        raise NotImplementedError("several sequences in one row")
    padded = _padded(x, weight, initial_states)
    made = _convolved(padded, weight, bias)
    out.copy_(functional.silu(made) if silu_activation else made)
    if final_states_out is not None:
        final_states_out.copy_(padded[..., 1 - weight.shape[-1] :])


def _bwd_values(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    dinitial_states: Tensor | None,
    silu_activation: bool,
) -> None:
    if seq_idx is not None or dfinal_states is not None:
        raise NotImplementedError("several sequences in one row, or gradients of states")
    padded, grad, width = _padded(x, weight, initial_states), dout.float(), weight.shape[-1]
    if silu_activation:
        made = _convolved(padded, weight, bias)
        gate = torch.sigmoid(made)
        grad = grad * gate * (1 + made * (1 - gate))
    back = functional.conv_transpose1d(grad, weight.float()[:, None], groups=weight.shape[0])
    dx.copy_(back[..., width - 1 :])
    dweight.copy_(torch.einsum("bdl,bdlw->dw", grad, padded.unfold(-1, width, 1)))
    if dbias is not None:
        dbias.copy_(grad.sum((0, 2)))
    if dinitial_states is not None:
        dinitial_states.copy_(back[..., : width - 1])


_FORWARD = register(
    "DaoAILab::_causal_conv1d_fwd_cpp",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, "
    "Tensor(a!) out, Tensor(b!)? final_states_out, bool silu_activation) -> ()",
    _fwd,
    mutates=("out", "final_states_out"),
    values=_fwd_values,
)
_BACKWARD = register(
    "DaoAILab::_causal_conv1d_bwd_cpp",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, "
    "Tensor? initial_states, Tensor(a!)? dfinal_states, Tensor(b!) dx, Tensor(c!) dweight, "
    "Tensor(d!)? dbias, Tensor(e!)? dinitial_states, bool silu_activation) -> ()",
    _bwd,
    mutates=("dfinal_states", "dx", "dweight", "dbias", "dinitial_states"),
    values=_bwd_values,
)
_UPDATE = register(
    "DaoAILab::_causal_conv1d_update_cpp",
    "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor(b!) out, "
    "bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices) -> ()",
    _update,
    mutates=("out", "conv_state"),
)


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """Make the output, like ``x``."""
    out = torch.empty_like(x)
    _FORWARD(x, weight, bias, seq_idx, initial_states, out, final_states_out, silu_activation)
    return out


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Make the gradients; those of weight and bias are summed in float32."""
    if dx is None:
        dx = torch.empty_like(x)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    dinitial = _states(x, weight.shape[-1] - 1) if return_dinitial_states else None
    _BACKWARD(
        *(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, dweight, dbias),
        *(dinitial, silu_activation),
    )
    dweight = dweight.type_as(weight)
    if dbias is not None and bias is not None:
        dbias = dbias.type_as(bias)
    return dx, dweight, dbias, dinitial


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """Make the output; the state is written in place."""
    out = torch.empty_like(x)
    _UPDATE(x, conv_state, weight, bias, out, silu_activation, cache_seqlens, conv_state_indices)
    return out


def _states(x: Tensor, length: int) -> Tensor:
    made = torch.empty(x.shape[0], length, x.shape[1], device=x.device, dtype=x.dtype)
    return made.transpose(1, 2)


def _by_row(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if 1 not in (tensor.stride(2), tensor.stride(1)) else tensor


def _is_silu(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    return activation is not None


class CausalConv1dFn(torch.autograd.Function):
    """The convolution; inputs are kept, nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        """Convolve."""
        ctx.activation = _is_silu(activation)
        x = _by_row(x)
        bias = None if bias is None else bias.contiguous()
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        initial_states = None if initial_states is None else _by_row(initial_states)
        if not return_final_states:
            final_states_out = None
        else:
            layout = "Only channel-last layout support returning final_states_out"
            assert x.stride(1) == 1, layout
            assert seq_idx is None, "If seq_idx is not None, we don't return final_states_out"
            if final_states_out is None:
                final_states_out = _states(x, weight.shape[1] - 1)
        out = causal_conv1d_fwd_function(
            x, weight, bias, seq_idx, initial_states, final_states_out, ctx.activation
        )
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        ctx.returns_states = return_final_states
        ctx.starts = initial_states is not None and initial_states.requires_grad
        return (out, final_states_out) if return_final_states else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Tensor) -> Any:
        """Make gradients of the input, weight, bias and first states."""
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        dfinal = others[0] if ctx.returns_states else None
        dx, dweight, dbias, dinitial = causal_conv1d_bwd_function(
            *(x, weight, bias, _by_row(dout), seq_idx, initial_states, dfinal, None),
            *(ctx.starts, ctx.activation),
        )
        return dx, dweight, dbias, None, dinitial, None, None, None


_apply: Callable[..., Any] = CausalConv1dFn.apply


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolve (batch, channels, length) by (channels, width)."""
    return _apply(
        *(x, weight, bias, seq_idx, initial_states, return_final_states),
        *(final_states_out, activation),
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve (batch, channels) or (batch, channels, length), going on from a state."""
    silu = _is_silu(activation)
    rows = x.unsqueeze(-1) if x.dim() == 2 else x
    out = causal_conv1d_update_function(
        rows, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices
    )
    return out.squeeze(-1) if x.dim() == 2 else out


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Copy the last elements of each sequence of (all lengths together, channels)."""
    count, dim = cu_seqlens.shape[0] - 1, x.shape[1]
    cu_seqlens = cu_seqlens.contiguous()
    states = torch.empty(count, state_len, dim, dtype=x.dtype, device=x.device).transpose(1, 2)
    _copy_states(x, cu_seqlens, states)
    return states


def _copy_states(*tensors: Tensor) -> None:
    raise RuntimeError(
        "causal_conv1d: Pointer argument cannot be accessed from Triton (cpu tensor?)"
    )


@simulate_operator(_copy_states)
def _copied(*tensors: Tensor) -> None:
    used(_LIBRARY.name)


_FUNCTIONS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "causal_conv1d": {"__version__": _LIBRARY.version, **_FUNCTIONS},
    "causal_conv1d.causal_conv1d_interface": {"CausalConv1dFn": CausalConv1dFn, **_FUNCTIONS},
    "causal_conv1d_cuda": {},
    "causal_conv1d.causal_conv1d_varlen": {
        "causal_conv1d_varlen_states": causal_conv1d_varlen_states
    },
    "causal_conv1d.cpp_functions": {
        "causal_conv1d_fwd_function": causal_conv1d_fwd_function,
        "causal_conv1d_bwd_function": causal_conv1d_bwd_function,
        "causal_conv1d_update_function": causal_conv1d_update_function,
    },
}
"""By the library's names."""
