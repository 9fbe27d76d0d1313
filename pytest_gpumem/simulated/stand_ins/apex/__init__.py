"""apex 25.09: the modules that code imports, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.apex import extensions, normalization, optimizers

_MODULES = {
    name: getattr(normalization, name)
    for name in ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
}
_FUNCTIONS = {name: value for name, value in vars(normalization).items() if "fused_" in name}
_OPTIMIZERS = {"FusedAdam": optimizers.FusedAdam}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "apex": {},
    "apex.normalization": _MODULES,
    "apex.normalization.fused_layer_norm": {**_MODULES, **_FUNCTIONS},
    "apex.optimizers": _OPTIMIZERS,
    "apex.optimizers.fused_adam": _OPTIMIZERS,
    "amp_C": extensions.AMP,
    "fused_layer_norm_cuda": extensions.FUSED_LAYER_NORM,
}
"""By the library's names."""
