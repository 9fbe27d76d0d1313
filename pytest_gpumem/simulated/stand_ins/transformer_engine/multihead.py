"""``MultiheadAttention`` and rotary embeddings.

Source: transformer_engine/pytorch/attention/multi_head_attention.py, rope.py and
csrc/extensions/apply_rope.cpp of 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine import layouts, norms
from pytest_gpumem.simulated.stand_ins.transformer_engine.attention import DotProductAttention
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import Init, only_defaults
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import launched, refuse
from pytest_gpumem.simulated.stand_ins.transformer_engine.linear import LayerNormLinear, Linear

_PARALLEL: dict[str, Any] = {
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "sequence_parallel": False,
    "softmax_type": "vanilla",
    "tp_group": None,
    "tp_size": 1,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
}
"""Options that have no stand-in, and what leaves them out."""


def _rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    launched()
    if frequencies.dim() != 4:
        raise RuntimeError("expected 4D tensor")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rotated = compiled(_rotate)


class _Rotary(torch.autograd.Function):
    """FusedRoPEFunc."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frequencies: Tensor, ends: Tensor | None) -> Tensor:
        """Rotate."""
        if frequencies.dtype != torch.float32:
            frequencies = frequencies.float()
        made: Tensor = _rotated(x, frequencies)
        ctx.save_for_backward(frequencies, ends)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rotate back."""
        frequencies, _ = ctx.saved_tensors
        return _rotated(grads[0], frequencies), None, None


_rotary: Callable[..., Tensor] = _Rotary.apply


class RotaryPositionEmbedding(nn.Module):
    """Angles of every position."""

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.factor = seq_len_interpolation_factor
        self.longest = pretrained_max_position_embeddings
        self.interleaved = interleaved
        # Each step of the expression goes before the next but one is made.
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device="cuda") / dim
        powers = rotary_base**powers
        self.register_buffer("inv_freq", 1.0 / powers)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return (length, 1, 1, dim) in float32."""
        device, dtype = self.inv_freq.device, self.inv_freq.dtype
        positions = torch.arange(max_seq_len, device=device, dtype=dtype) + offset
        if self.longest is not None and self.factor is not None:
            beyond = max_seq_len > self.longest * self.factor
            positions *= self.longest / max_seq_len if beyond else 1 / self.factor
        angles = torch.einsum("i , j -> i j", positions, self.inv_freq)
        if self.interleaved:
            column = angles.view(-1, 1)
            pairs = torch.stack((column, column), dim=-1).view(angles.shape[0], -1)
        else:
            pairs = torch.cat((angles, angles), dim=-1)
        return pairs.reshape(pairs.size(0), 1, 1, pairs.size(1))


class MultiheadAttention(nn.Module):
    """Projections, attention and an output projection."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        only_defaults(type(self).__name__, options, _PARALLEL)
        if attention_type not in ("self", "cross"):
            raise AssertionError(f"attention_type {attention_type} not supported")
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.layer_number = window_size, layer_number or 1
        self.input_layernorm, self.attention_type = input_layernorm, attention_type
        self.return_layernorm_output, self.return_bias = return_layernorm_output, return_bias
        self.rotary_pos_interleaved, self.name = rotary_pos_interleaved, name
        self.qk_norm_before_rope = qk_norm_before_rope
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % self.num_gqa_groups:
            raise AssertionError(
                "The number of attention heads must be divisible by the number of GQA groups!"
            )
        self.head_size = kv_channels or hidden_size // num_attention_heads
        rows_q = self.head_size * num_attention_heads
        rows_kv = self.head_size * self.num_gqa_groups
        self.q_norm, self.k_norm = _head_norms(qk_norm_type, self.head_size, qk_norm_eps, device)

        linear: dict[str, Any] = {
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma,
        }

        def project(rows: int, split: Any, normalizes: bool) -> nn.Module:
            parts = None if fuse_qkv_params else split
            if normalizes:
                return LayerNormLinear(hidden_size, rows, parameters_split=parts, **norm, **linear)
            return Linear(hidden_size, rows, parameters_split=parts, **linear)

        if attention_type == "self":
            split = {"query": rows_q, "key": rows_kv, "value": rows_kv}
            made = project(rows_q + 2 * rows_kv, split, input_layernorm)
            self.add_module("layernorm_qkv" if input_layernorm else "qkv", made)
        else:
            made = project(rows_q, ("query",) if input_layernorm else None, input_layernorm)
            self.add_module("layernorm_query" if input_layernorm else "query_layer", made)
            self.key_value = project(2 * rows_kv, ("key", "value"), False)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_size,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            layer_number=self.layer_number,
            attention_type=attention_type,
        )
        linear |= {
            "init_method": output_layer_init_method,
            "parallel_mode": "row" if set_parallel_mode else None,
        }
        self.proj = Linear(rows_q, hidden_size, return_bias=return_bias, **linear)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attend: (length, batch, hidden), or as ``qkv_format`` says."""
        if self.attention_type == "self":
            project = self.get_submodule("layernorm_qkv" if self.input_layernorm else "qkv")
            mixed, *normal = _several(project(hidden_states, is_first_microbatch))
            query, key, value = self._split(mixed)
        else:
            key, value = self._split_pair(self.key_value(encoder_output, is_first_microbatch))
            name = "layernorm_query" if self.input_layernorm else "query_layer"
            project = self.get_submodule(name)
            made, *normal = _several(project(hidden_states, is_first_microbatch))
            query = made.view(*made.shape[:-1], self.num_attention_heads, self.head_size)
            del made
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotary_pos_emb is not None:
            both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            ends = cu_seqlens_q, cu_seqlens_kv
            if pad_between_seqs:
                ends = cu_seqlens_q_padded, cu_seqlens_kv_padded
            query = _rotary(query, both[0], ends[0])
            key = _rotary(key, both[1], ends[1])
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            query, key = self.q_norm(query), self.k_norm(key)
        context = self.core_attention(
            query,
            key,
            value,
            qkv_format=self.qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attention_mask=attention_mask,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs,
        )
        returned = *_several(self.proj(context, is_first_microbatch)), *normal
        return returned if returned[1:] else returned[0]

    def _split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of one projection."""
        each = self.num_attention_heads // self.num_gqa_groups
        sizes = (self.num_gqa_groups, each + 2)
        if not self.qkv_weight_interleaved:
            sizes = sizes[::-1]
        mixed = mixed.view(*mixed.shape[:-1], *sizes, self.head_size)
        dim = -2 if self.qkv_weight_interleaved else -3
        parts = layouts.split(mixed, dim, (each, 1, 1))
        return tuple(self._heads(part) for part in parts)

    def _split_pair(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of one projection."""
        groups, size = self.num_gqa_groups, self.head_size
        shape = (groups, 2 * size) if self.qkv_weight_interleaved else (2 * groups, size)
        mixed = mixed.view(*mixed.shape[:-1], *shape)
        dim = -1 if self.qkv_weight_interleaved else -2
        half = mixed.shape[dim] // 2
        return tuple(self._heads(part) for part in layouts.split(mixed, dim, (half, half)))

    def _heads(self, part: Tensor) -> Tensor:
        outer = part.shape[: 1 if self.qkv_format == "thd" else 2]
        return part.reshape(*outer, -1, self.head_size)


def _several(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def _head_norms(
    kind: str | None, size: int, eps: float, device: Any
) -> tuple[nn.Module | None, nn.Module | None]:
    """_create_qk_norm_modules()."""
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        refuse("MultiheadAttention(qk_norm_type='L2Normalization')")
    classes = {"LayerNorm": norms.LayerNorm, "RMSNorm": norms.RMSNorm}
    if kind not in classes:
        raise ValueError(
            f"Unsupported QK norm type: {kind}. "
            "Supported types: ['L2Normalization', 'RMSNorm', 'LayerNorm']"
        )
    made = [classes[kind](size, eps=eps, device=device) for _ in range(2)]
    return made[0], made[1]
