"""The functions of xformers' attention and what autograd keeps of them.

Source: xformers/ops/fmha/__init__.py of xformers 0.0.35.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.xformers import biases, padded
from pytest_gpumem.simulated.stand_ins.xformers.attention import Kept, Kernel, chosen
from pytest_gpumem.simulated.stand_ins.xformers.inputs import Inputs

_Kernels = tuple[type[Kernel] | None, type[Kernel] | None]


def _backward_of(inp: Inputs, forward: type[Kernel], wanted: type[Kernel] | None) -> type[Kernel]:
    several = inp.lengths is not None and inp.lengths[0].shape[0] > 2
    if inp.p or several:
        # What is dropped, and packed or padded sums, only its own backward reads.
        if wanted not in (None, forward):
            raise ValueError(f"op_bw cannot go with op_fw={forward.NAME}. Please set op_bw=None.")
        return chosen(inp, forward, backward=True, asked=bool(inp.p) or wanted is not None)
    return chosen(inp, wanted, backward=True)


class MemoryEfficientAttention(torch.autograd.Function):
    """Attention that keeps its inputs, output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: _Kernels,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any,
        p: float,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend."""
        inp = Inputs(query, key, value, attn_bias, p, scale)
        kernel = chosen(inp, kernels[0])
        out, kept = kernel.forward(inp, trains=True)
        assert kept is not None
        ctx.save_for_backward(query, key, value, out, kept.lse)
        ctx.kernel = _backward_of(inp, kernel, kernels[1])
        ctx.random, ctx.rest = kept.random, (attn_bias, p, scale)
        return out, kept.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of queries, keys, values and a matrix that was added."""
        query, key, value, out, lse = ctx.saved_tensors
        inp = Inputs(query, key, value, *ctx.rest)
        made = ctx.kernel.backward(inp, out, Kept(lse, ctx.random), grads[0])
        return None, *made, None, None


_apply: Callable[..., Any] = MemoryEfficientAttention.apply


def _asked(op: Any) -> _Kernels:
    if op is None:
        return None, None
    return op if isinstance(op, tuple) else (op, None)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attend: (batch, length, heads, size), or (batch, length, size) with one head."""
    tensors = query, key, value
    if not any(each.requires_grad for each in tensors):
        return memory_efficient_attention_forward(
            *tensors, attn_bias, p, scale, op=_asked(op)[0], output_dtype=output_dtype
        )
    _check_dtype(query, output_dtype)
    shape = (*query.shape[:-1], value.shape[-1])
    inp = Inputs(*tensors, attn_bias, p, scale).checked()
    given = inp.query, inp.key, inp.value, inp.attn_bias, inp.p, inp.scale
    out: Tensor = _apply(_asked(op), *given)[0]
    return out.reshape(shape)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attend, and keep nothing."""
    _check_dtype(query, output_dtype)
    shape = (*query.shape[:-1], value.shape[-1])
    inp = Inputs(query, key, value, attn_bias, p, scale).checked()
    out, _ = chosen(inp, op).forward(inp, trains=False)
    return out.reshape(shape)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend: the output and logsumexp."""
    _check_dropout(p)
    _check_dtype(query, output_dtype)
    shape = (*query.shape[:-1], value.shape[-1])
    inp = Inputs(query, key, value, attn_bias, p, scale).checked()
    out, kept = chosen(inp, op).forward(inp, trains=True)
    assert kept is not None
    return out.reshape(shape), kept.lse


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    _check_dropout(p)
    shapes = query.shape, key.shape, value.shape
    inp = Inputs(query, key, value, attn_bias, p, scale).checked()
    if grad.ndim == 3:
        grad, output = grad.unsqueeze(2), output.unsqueeze(2)
    made = chosen(inp, op, backward=True).backward(inp, output, Kept(lse), grad)
    dq, dk, dv = (
        each.reshape(shape) for each, shape in zip(made, shapes, strict=False) if each is not None
    )
    return dq, dk, dv


def _check_dtype(query: Tensor, output_dtype: torch.dtype | None) -> None:
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError("Custom output dtype not supported")


def _check_dropout(p: float) -> None:
    if p:
        raise NotImplementedError(
            "dropout is not supported on the non-autograd API. If you want to use dropout, please "
            "call `memory_efficient_attention` directly"
        )


BIASES = {
    name: value
    for name, value in {**vars(biases), **vars(padded)}.items()
    if isinstance(value, type)
    and issubclass(value, biases.AttentionBias)
    and value not in (padded.PagedBlockDiagonalMask, padded.PartlyUsedKeysMask)
}
"""The masks, by their names."""
