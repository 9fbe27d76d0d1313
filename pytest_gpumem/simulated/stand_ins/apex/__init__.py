"""apex 25.09: the modules that code imports, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.apex import (
    extensions,
    multi_tensor,
    normalization,
    optimizers,
    xentropy,
)

_MODULES = {
    name: getattr(normalization, name)
    for name in ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
}
_FUNCTIONS = {name: value for name, value in vars(normalization).items() if "fused_" in name}
_BY_MODULE: Mapping[str, Any] = {
    "fused_adagrad": multi_tensor.FusedAdagrad,
    "fused_adam": optimizers.FusedAdam,
    "fused_lamb": multi_tensor.FusedLAMB,
    "fused_mixed_precision_lamb": multi_tensor.FusedMixedPrecisionLamb,
    "fused_novograd": multi_tensor.FusedNovoGrad,
    "fused_sgd": multi_tensor.FusedSGD,
}
_LOSS = {"SoftmaxCrossEntropyLoss": xentropy.SoftmaxCrossEntropyLoss}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "apex": {},
    "apex.normalization": _MODULES,
    "apex.normalization.fused_layer_norm": {**_MODULES, **_FUNCTIONS},
    "apex.contrib": {},
    "apex.contrib.xentropy": _LOSS,
    "apex.contrib.xentropy.softmax_xentropy": _LOSS,
    "apex.optimizers": {each.__name__: each for each in _BY_MODULE.values()},
    **{f"apex.optimizers.{name}": {each.__name__: each} for name, each in _BY_MODULE.items()},
    "amp_C": extensions.AMP,
    "fused_layer_norm_cuda": extensions.FUSED_LAYER_NORM,
    "xentropy_cuda": xentropy.XENTROPY,
}
"""By the library's names."""
