"""``TransformerLayer``: transformer_engine/pytorch/transformer.py of 2.8."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gpumem.simulated.stand_ins.transformer_engine import fused, norms
from pytest_gpumem.simulated.stand_ins.transformer_engine.base import Init, only_defaults
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import cast, refuse
from pytest_gpumem.simulated.stand_ins.transformer_engine.mlp import LayerNormMLP
from pytest_gpumem.simulated.stand_ins.transformer_engine.multihead import MultiheadAttention

_PARALLEL: dict[str, Any] = {
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "sequence_parallel": False,
    "softmax_type": "vanilla",
    "tp_group": None,
    "tp_size": 1,
    "ub_tp_comm_overlap": False,
}
"""Options that have no stand-in, and what leaves them out."""
_OVERLAPS = (
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
)
"""Options that mean nothing without ``ub_tp_comm_overlap``."""


class _DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def forward(self, hidden: Tensor) -> Tensor:
        """Drop whole samples."""
        if not self.training:
            return hidden
        keep = 1 - self.drop_prob
        shape = hidden.shape[0], *[1] * (hidden.ndim - 1)
        drawn = keep + torch.rand(shape, dtype=hidden.dtype, device=hidden.device)
        drawn.floor_()
        return hidden.div(keep) * drawn


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, with residuals."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        asked = {key: value for key, value in options.items() if key not in _OVERLAPS}
        only_defaults(type(self).__name__, asked, _PARALLEL)
        if seq_length and micro_batch_size:
            refuse("TransformerLayer with seq_length and micro_batch_size, which warm it up")
        if layer_type not in ("encoder", "decoder"):
            raise AssertionError(f"layer_type {layer_type} not supported")
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.enc_dec_window_size = enc_dec_window_size
        self.after_norm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp, self.layer_type = parallel_attention_mlp, layer_type
        self.output_layernorm, self.hidden_dropout = output_layernorm, hidden_dropout
        self.layer_number, self.name = layer_number, name
        alike: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
            "return_layernorm_output": self.after_norm,
            "set_parallel_mode": set_parallel_mode,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "normalization": normalization,
            "device": device,
        }
        attention: dict[str, Any] = {
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            **alike,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            input_layernorm=not output_layernorm,
            return_bias=not parallel_attention_mlp,
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                input_layernorm=True,
                attention_type="cross",
                return_bias=True,
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            return_bias=not parallel_attention_mlp,
            activation=activation,
            **alike,
        )
        self.drop_path = _DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            norm = {"LayerNorm": norms.LayerNorm, "RMSNorm": norms.RMSNorm}[normalization]
            self.layernorm = norm(
                hidden_size,
                eps=layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
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
    ) -> Tensor:
        """Return what has the shape of ``hidden_states``."""
        hidden_states = hidden_states.contiguous()
        if torch.is_autocast_enabled("cuda"):
            hidden_states = cast(hidden_states, torch.get_autocast_dtype("cuda"))
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
        }
        made = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_kv=max_seqlen_q,
            **common,
        )
        if self.after_norm and not self.output_layernorm:
            hidden_states = self._added(made[0], made[1], made[2], self.drop_path)
        elif not self.parallel_attention_mlp:
            hidden_states = self._added(made[0], made[1], hidden_states, self.drop_path)
        if self.layer_type == "decoder":
            crossed = self.inter_attention(
                hidden_states,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
                window_size=(
                    self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size
                ),
                encoder_output=encoder_output,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_kv=max_seqlen_kv,
                **common,
            )
            residual = crossed[2] if self.after_norm else hidden_states
            hidden_states = self._added(crossed[0], crossed[1], residual)
        out = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        if self.after_norm:
            added = self._added(out[0], out[1], out[2], self.drop_path)
        elif self.parallel_attention_mlp:
            added = self._added(made, out, hidden_states, self.drop_path)
        else:
            added = self._added(out[0], out[1], hidden_states, self.drop_path)
        if self.output_layernorm:
            normal: Tensor = self.layernorm(added)
            return normal
        return added

    def _added(
        self, hidden: Tensor, bias: Tensor, residual: Tensor, drop_path: nn.Module | None = None
    ) -> Tensor:
        """_bias_dropout_add()."""
        rate, has_bias = self.hidden_dropout, bias.numel() != 0
        if drop_path is None and has_bias:
            if os.environ.get("NVTE_BIAS_DROPOUT_FUSION", "1") != "0":
                return fused.bias_dropout_add(hidden, bias, residual, rate, training=self.training)
            with torch.enable_grad():
                out = functional.dropout(hidden + bias, p=rate, training=self.training)
                return residual + out
        if has_bias:
            hidden = hidden + bias
        out = functional.dropout(hidden, p=rate, training=self.training)
        if drop_path is not None:
            out = drop_path(out)
        return residual + out
