"""Attention of torch's own operators, with one softmax kernel.

Source: transformer_engine/pytorch/attention/dot_product_attention/backends.py
(``UnfusedDotProductAttention``), softmax.py, utils.py (``get_full_mask``) and
csrc/extensions/softmax.cpp of 2.8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import launched, refuse
from pytest_gpumem.simulated.stand_ins.usage import keeping

_THREADS, _WARP = 128, 32


def _softmax(scores: Tensor) -> Tensor:
    launched()
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


_softmax_of = compiled(_softmax)


class _Softmax(torch.autograd.Function):
    """ScaledSoftmax and ScaledMaskedSoftmax."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Keep what is returned."""
        made: Tensor = _softmax_of(scores)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The kernel writes over the gradient."""
        return grads[0].contiguous()


_apply: Callable[[Tensor], Tensor] = _Softmax.apply


def _is_fused(scores: Tensor, mask: Tensor, kind: str) -> bool:
    """FusedScaleMaskSoftmax.is_kernel_available()."""
    batch, heads, rows, columns = scores.shape
    if os.environ.get("NVTE_MASKED_SOFTMAX_FUSION", "1") == "0" or scores.dtype == torch.float32:
        return False
    if not 16 < columns < 16384 or columns % 8 or rows == 1:
        return False
    if kind == "causal" and rows != columns:
        return False
    power = 1 << (columns - 1).bit_length()
    rows_of_block = _THREADS // min(power, _WARP) * (2 if power <= 128 else 1)
    if rows % 4 or batch * heads % 4 or rows % rows_of_block:
        return False
    if "padding" in kind or kind == "arbitrary":
        return mask.shape[0] in (1, batch) and tuple(mask.shape[1:]) == (1, rows, columns)
    return True


def _causal_mask(kind: str, rows: int, columns: int) -> Tensor:
    """_get_default_causal_mask(): of the process."""

    def make() -> Tensor:
        ones = torch.ones(rows, columns, dtype=torch.bool, device="cuda")
        return ones.triu(columns - rows + 1 if "bottom_right" in kind else 1)

    return keeping(f"transformer-engine's {kind} mask of {rows} and {columns}", make)


def _torch_softmax(scores: Tensor, mask: Tensor, kind: str) -> Tensor:
    dtype = scores.dtype
    if dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if kind in ("causal", "causal_bottom_right"):
        mask = torch.logical_or(mask, _causal_mask(kind, scores.size(2), scores.size(3)))
    if kind != "no_mask":
        scores.masked_fill_(mask, -10000.0)
    probabilities = functional.softmax(scores, dim=-1)
    return probabilities if probabilities.dtype == dtype else probabilities.to(dtype)


def _full_mask(
    rows: int, columns: int, kind: str, mask: Any, window: tuple[int, int], attention: str
) -> tuple[str, Tensor, tuple[Tensor, ...]]:
    """get_full_mask(): its kind, the mask, and how long padded sequences are."""
    limited = window not in ((-1, -1), (-1, 0))
    left = columns if window[0] == -1 else window[0]
    right = 0 if "causal" in kind else rows if window[1] == -1 else window[1]
    lengths: tuple[Tensor, ...] = ()
    if "padding" in kind:
        one, other = (mask, mask) if attention == "self" else mask
        mask = torch.logical_or(one.squeeze(1).unsqueeze(3), other)
        kept = mask.logical_not()
        lengths = kept[:, 0, :, 0].sum(dim=1), kept[:, 0, 0, :].sum(dim=1)
    apart = torch.arange(rows, dtype=torch.int32, device="cuda").view(1, 1, rows, 1) - torch.arange(
        columns, dtype=torch.int32, device="cuda"
    ).view(1, 1, 1, columns)
    if kind in ("causal_bottom_right", "no_mask", "arbitrary"):
        before = apart + columns - rows - left
        behind = apart + columns - rows + right
    elif lengths and kind != "padding_causal":
        apart = apart.expand(len(lengths[0]), 1, rows, columns)
        before = apart + (lengths[1] - lengths[0] - left).view(-1, 1, 1, 1)
        behind = apart + (lengths[1] - lengths[0] + right).view(-1, 1, 1, 1)
    else:
        before, behind = apart - left, apart + right
    outside = torch.logical_not((before <= 0) & ~(behind < 0))
    whole = outside if mask is None else torch.logical_or(outside, mask)
    return "arbitrary" if limited else kind, whole, lengths


def _given(bias: Tensor | None) -> Tensor:
    if bias is None:
        raise AssertionError("core_attention_bias should not be None!")
    return bias


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    format: str,
    mask_type: str,
    mask: Any,
    window: tuple[int, int],
    attention: str,
    bias_type: str,
    bias: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """UnfusedDotProductAttention: (rows, batch, heads * size), or batch first as ``q`` is."""
    if os.environ.get("NVTE_APPLY_QK_LAYER_SCALING", "0") != "0":
        refuse("NVTE_APPLY_QK_LAYER_SCALING=1")
    if format == "bshd":
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    rows, batch, heads, _ = q.shape
    columns = k.shape[0]
    if "padding" in mask_type and mask is None:
        refuse("DotProductAttention of padded sequences without an attention_mask, unfused")
    # The library, too, keeps a name for the lengths until it returns.
    kind, whole, _lengths = _full_mask(rows, columns, mask_type, mask, window, attention)
    if k.shape[2] != heads:
        k, v = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (k, v))
    q = q.reshape(rows, batch * heads, -1)
    k = k.reshape(columns, batch * heads, -1)
    scores = torch.empty(
        batch * heads, rows, columns, dtype=q.dtype, device=torch.cuda.current_device()
    )
    turned = q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2)
    shape = batch, heads, rows, columns
    if bias_type == "pre_scale_bias":
        scores = torch.bmm(*turned)
        scores = scores.view(shape) + _given(bias)
        scores *= scale
    else:
        scores = torch.baddbmm(scores, *turned, beta=0.0, alpha=scale)
        if bias_type == "no_bias":
            scores = scores.view(shape)
        else:
            scores = (scores.view(shape) + _given(bias)).to(dtype=q.dtype)
    if _is_fused(scores, whole, kind):
        probabilities = _apply(scores)
    else:
        probabilities = _torch_softmax(scores, whole, kind)
    if "padding" in kind:
        probabilities = probabilities.masked_fill(whole, 0)
    probabilities = functional.dropout(probabilities, dropout, dropout > 0)
    v = v.reshape(columns, batch * heads, -1)
    probabilities = probabilities.view(batch * heads, rows, -1)
    made = torch.bmm(probabilities, v.transpose(0, 1)).view(batch, heads, rows, -1)
    if format == "sbhd":
        return made.permute(2, 0, 1, 3).contiguous().view(rows, batch, -1)
    return made.permute(0, 2, 1, 3).contiguous().view(batch, rows, -1)
