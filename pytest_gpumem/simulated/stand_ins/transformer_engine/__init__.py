"""transformer-engine 2.8: the modules that code imports, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES
from pytest_gpumem.simulated.stand_ins.transformer_engine import (
    attention,
    checkpointing,
    fp8,
    linear,
    mlp,
    multihead,
    norms,
    transformer,
)

_MODULES = {
    "LayerNorm": norms.LayerNorm,
    "LayerNormLinear": linear.LayerNormLinear,
    "LayerNormMLP": mlp.LayerNormMLP,
    "Linear": linear.Linear,
    "RMSNorm": norms.RMSNorm,
}
_ATTENTION = {
    "DotProductAttention": attention.DotProductAttention,
    "MultiheadAttention": multihead.MultiheadAttention,
    "RotaryPositionEmbedding": multihead.RotaryPositionEmbedding,
}
_LAYER = {"TransformerLayer": transformer.TransformerLayer}
_REGION = {"fp8_autocast": fp8.fp8_autocast}
_CHECKPOINT = {"checkpoint": checkpointing.checkpoint}
_RECIPES = {"DelayedScaling": fp8.DelayedScaling, "Format": fp8.Format}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "transformer_engine": {"__version__": LIBRARIES["transformer-engine"].version},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _RECIPES,
    "transformer_engine.pytorch": {
        **_MODULES,
        **_ATTENTION,
        **_LAYER,
        **_REGION,
        **_CHECKPOINT,
    },
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.distributed": _CHECKPOINT,
    "transformer_engine.pytorch.fp8": _REGION,
    "transformer_engine.pytorch.module": _MODULES,
    "transformer_engine.pytorch.transformer": _LAYER,
}
"""By the library's names."""
