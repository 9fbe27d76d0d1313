"""``DotProductAttention``.

Source: transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py,
backends.py (``FusedAttnFunc``, ``FlashAttention``) and utils.py (``get_cu_seqlens``,
``get_full_cu_seqlens``) of 2.8.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pytest_gpumem.simulated.stand_ins.transformer_engine import cudnn
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import only_defaults
from pytest_gpumem.simulated.stand_ins.transformer_engine.choice import (
    FLASH,
    FLASH_3,
    FUSED,
    Asked,
    choose,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import ModuleState
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import refuse
from pytest_gpumem.simulated.stand_ins.transformer_engine.layouts import INTERLEAVED, arranged
from pytest_gpumem.simulated.stand_ins.transformer_engine.unfused import attend
from pytest_gpumem.simulated.stand_ins.usage import keeping

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
FORMATS = ("sbhd", "bshd", "thd")
_PARALLEL: dict[str, Any] = {
    "cp_comm_type": "p2p",
    "cp_global_ranks": None,
    "cp_group": None,
    "cp_stream": None,
    "get_rng_state_tracker": None,
    "sequence_parallel": False,
    "softmax_type": "vanilla",
    "tp_group": None,
    "tp_size": 1,
}
_UNSUPPORTED: dict[str, Any] = {
    "alibi_slopes": None,
    "checkpoint_core_attention": False,
    "fast_zero_fill": True,
    "fp8_output": False,
    "inference_params": None,
}
"""Options that have no stand-in, and what leaves them out."""


def mask_type(name: str) -> str:
    """The mask under its one name."""
    name = name.replace(",", "_")
    return "padding_causal" if name == "causal_padding" else name


def _window(mask: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """check_set_window_size()."""
    if mask not in MASKS:
        raise AssertionError(f"Attention mask type {mask} is not supported!")
    if window is None:
        return (-1, 0) if "causal" in mask else (-1, -1)
    left, right = window
    if "causal" in mask:
        return left, 0
    return (-1, -1) if (left, right) == (-1, 0) else (left, right)


def _full_lengths(batch: int, length: int, device: torch.device) -> Tensor:
    """get_full_cu_seqlens(): of the process, one for each batch and length."""

    def make() -> Tensor:
        return torch.arange(0, (batch + 1) * length, step=length, dtype=torch.int32, device=device)

    return keeping(f"transformer-engine's {batch} sequences of {length}", make)


def _lengths(mask: Tensor) -> Tensor:
    """get_cu_seqlens()."""
    kept = mask.squeeze(1).squeeze(1).logical_not().sum(dim=1)
    ends = kept.cumsum(dim=0).to(torch.int32)
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    return torch.cat((zero, ends))


class _Call(NamedTuple):
    """What of one call is not a tensor."""

    layout: str
    shape: cudnn.Shape


class _Fused(torch.autograd.Function):
    """FusedAttnFunc."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        lengths_q: Tensor,
        lengths_kv: Tensor,
        call: _Call,
    ) -> Tensor:
        """Attend."""
        out, sums, state = cudnn.forward(q, v, call.shape)
        ctx.save_for_backward(q, k, v, out, lengths_q, lengths_kv, sums, state, bias)
        ctx.call = call
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of queries, keys, values and bias."""
        grad = grads[0].contiguous()
        q, k, v, *_, bias = ctx.saved_tensors
        made, of_bias = cudnn.backward(ctx.call.layout, q, k, v, grad, bias, ctx.call.shape)
        return *made, of_bias, None, None, None


_fused: Callable[..., Tensor] = _Fused.apply


class DotProductAttention(nn.Module):
    """Attention of queries to keys and values."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        only_defaults(type(self).__name__, options, _PARALLEL)
        if attention_type not in ("self", "cross"):
            raise AssertionError(f"attention_type {attention_type} not supported")
        self.qkv_format, self.attn_mask_type = qkv_format, mask_type(attn_mask_type)
        self.window_size = _window(self.attn_mask_type, window_size)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % self.num_gqa_groups:
            raise AssertionError(
                "The number of attention heads must be divisible by the number of GQA groups!"
            )
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.layer_number = layer_number or 1
        sizes = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.head_sizes = sizes
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(sizes[0])
        self.deterministic = (
            os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
            or torch.are_deterministic_algorithms_enabled()
        )
        self._fp8 = ModuleState()

    @_disable_dynamo
    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
    ) -> Tensor:
        """Attend: (length, batch, heads * size), or as ``qkv_format`` says."""
        given = {name: value for name, value in locals().items() if name in _UNSUPPORTED}
        only_defaults(type(self).__name__, given, _UNSUPPORTED)
        if core_attention_bias_type == "alibi":
            refuse("DotProductAttention with core_attention_bias_type='alibi'")
        kind = self.attn_mask_type if attn_mask_type is None else mask_type(attn_mask_type)
        window = _window(kind, self.window_size if window_size is None else window_size)
        format = qkv_format or self.qkv_format
        q, k, v = query_layer, key_layer, value_layer
        self._check(q, k, v, format, kind)
        self._fp8.prepare(3)
        batch, length_q, length_kv = _extent(
            q, k, format, (cu_seqlens_q, cu_seqlens_kv), (max_seqlen_q, max_seqlen_kv)
        )
        padded = cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None
        if format == "thd" and pad_between_seqs is None and padded:
            refuse("DotProductAttention with padding between sequences and no pad_between_seqs")
        layout, q, k, v = arranged(q, k, v)
        if format != "thd":
            cu_seqlens_q, cu_seqlens_kv = self._cumulative(
                kind, attention_mask, batch, (length_q, length_kv), (cu_seqlens_q, cu_seqlens_kv)
            )
        asked = Asked(
            dtype=q.dtype,
            format=format,
            layout=layout,
            mask=kind,
            window=window,
            bias=core_attention_bias_type,
            bias_needs_grad=core_attention_bias is not None and core_attention_bias.requires_grad,
            dropout=self.attention_dropout,
            training=self.training,
            deterministic=self.deterministic,
            padded=bool(pad_between_seqs),
            heads=q.shape[-2],
            groups=k.shape[-2],
            length_q=length_q,
            length_kv=length_kv,
            size_qk=q.shape[-1],
            size_v=v.shape[-1],
        )
        chosen = choose(asked)
        bias = core_attention_bias
        if chosen == FUSED:
            _refuse_variables()
            if bias is not None and tuple(bias.shape[:2]) != (1, asked.heads):
                refuse("DotProductAttention with a bias of another shape than [1, heads, ...]")
            shape = _shape(asked, batch, q, k, bias)
            call = _Call(layout, shape)
            out = _fused(q, k, v, bias, cu_seqlens_q, cu_seqlens_kv, call)
            return out.view(*out.shape[:-2], -1)
        if chosen in (FLASH, FLASH_3):
            lengths = cu_seqlens_q, cu_seqlens_kv
            return self._flash(chosen, asked, q, k, v, lengths)
        return attend(
            q,
            k,
            v,
            format=format,
            mask_type=kind,
            mask=attention_mask,
            window=window,
            attention=self.attention_type,
            bias_type=core_attention_bias_type,
            bias=bias,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
        )

    def _check(self, q: Tensor, k: Tensor, v: Tensor, format: str, mask: str) -> None:
        if not q.is_cuda or not k.is_cuda or not v.is_cuda:
            raise AssertionError("DotProductAttention only supports CUDA tensors.")
        if not q.dtype == k.dtype == v.dtype:
            raise AssertionError("Queries, keys and values must have the same data type!")
        if k.shape[:-1] != v.shape[:-1]:
            raise AssertionError(
                "Keys and values must have the same batch size, sequence length and number of "
                "heads!"
            )
        if (q.shape[-1], k.shape[-1], v.shape[-1]) != (self.head_sizes[0], *self.head_sizes):
            raise AssertionError(f"Queries, keys and values must have heads of {self.head_sizes}")
        if k.shape[-2] != self.num_gqa_groups:
            raise AssertionError(
                f"Keys and values must have num_gqa_group = {self.num_gqa_groups} heads! "
                f"Found {k.shape[-2]}."
            )
        if format not in FORMATS:
            raise AssertionError(
                "DotProductAttention only supports qkv_format = {'sbhd', 'bshd', 'thd'}!"
            )
        if format == "thd" and "padding" not in mask:
            raise AssertionError(
                "Attention mask type must be padding or padding_causal for qkv_format=thd!"
            )

    def _cumulative(
        self,
        kind: str,
        mask: Any,
        batch: int,
        lengths: tuple[int, int],
        given: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Ends of sequences, of queries and of keys."""
        made = []
        for index, (length, ends) in enumerate(zip(lengths, given, strict=True)):
            if ends is None and "padding" in kind:
                if mask is None:
                    raise AssertionError("Please provide attention_mask for padding!")
                ends = _lengths(mask if self.attention_type == "self" else mask[index])
            if ends is None:
                ends = _full_lengths(batch, length, torch.device("cuda"))
            made.append(ends)
        return made[0], made[1]

    def _flash(
        self,
        name: str,
        asked: Asked,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """FlashAttention."""
        third = name == FLASH_3
        if asked.format != "thd" and "padding" in asked.mask:
            refuse(f"DotProductAttention of padded sequences by {name}")
        if asked.format == "sbhd":
            rows = q.shape[0] * q.shape[1]
            if asked.layout == INTERLEAVED and asked.size_qk == 128 and rows >= 512:
                refuse(f"DotProductAttention of interleaved heads by {name}")
            q, k, v = (each.transpose(0, 1).contiguous() for each in (q, k, v))
        where = "flash_attn_3" if third else "flash_attn"
        library = importlib.import_module(f"{where}.flash_attn_interface")
        varlen = asked.format == "thd"
        run = library.flash_attn_varlen_func if varlen else library.flash_attn_func
        behind: list[Any] = [*lengths, asked.length_q, asked.length_kv] if varlen else []
        if not third:
            behind.append(self.attention_dropout if self.training else 0.0)
        out = run(
            *(q, k, v, *behind),
            softmax_scale=self.softmax_scale,
            causal=asked.is_causal,
            window_size=asked.window,
            deterministic=self.deterministic,
        )
        out = out[0] if isinstance(out, tuple) else out
        flat: Tensor = out.reshape(*out.shape[:-2], -1)
        return (flat.transpose(0, 1) if asked.format == "sbhd" else flat).contiguous()


def _extent(
    q: Tensor,
    k: Tensor,
    format: str,
    ends: tuple[Tensor | None, Tensor | None],
    lengths: tuple[int | None, int | None],
) -> tuple[int, int, int]:
    """Batch, and the longest sequence of queries and of keys."""
    if format != "thd":
        at = format.index("s")
        pairs = zip((q, k), lengths, strict=True)
        found = [each.shape[at] if length is None else length for each, length in pairs]
        return q.shape[1 - at], found[0], found[1]
    if ends[0] is None or ends[1] is None:
        raise AssertionError(
            "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        )
    longest = []
    for end, length in zip(ends, lengths, strict=True):
        if length is None and end is not None:
            length = int((end[1:] - end[:-1]).max().item() + 63) // 64 * 64
        longest.append(length or 0)
    return len(ends[0]) - 1, longest[0], longest[1]


def _shape(asked: Asked, batch: int, q: Tensor, k: Tensor, bias: Tensor | None) -> cudnn.Shape:
    return cudnn.Shape(
        batch=batch,
        heads=asked.heads,
        groups=asked.groups,
        length_q=asked.length_q,
        length_kv=asked.length_kv,
        size_qk=asked.size_qk,
        size_v=asked.size_v,
        tokens=(q.shape[0], k.shape[0]) if asked.format == "thd" else None,
        pads="padding" in asked.mask,
        keeps_scores=bias is not None or asked.deterministic,
    )


def _refuse_variables() -> None:
    for name, plain in (("NVTE_FUSED_ATTN_BACKEND", "1"), ("NVTE_FUSED_ATTN_USE_FAv2_BWD", "0")):
        value = os.environ.get(name, plain)
        if value != plain:
            refuse(f"{name}={value}")
