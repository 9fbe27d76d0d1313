"""xformers 0.0.35, its attention: the modules that code imports, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES
from pytest_gpumem.simulated.stand_ins.xformers import functions
from pytest_gpumem.simulated.stand_ins.xformers.attention import Cutlass, Flash
from pytest_gpumem.simulated.stand_ins.xformers.biases import SeqLenInfo
from pytest_gpumem.simulated.stand_ins.xformers.inputs import VARLEN
from pytest_gpumem.simulated.stand_ins.xformers.padded import GappySeqInfo, PaddedSeqLenInfo

_FUNCTIONS = {
    name: function
    for name, function in vars(functions).items()
    if name.startswith("memory_efficient_attention")
}
_CUTLASS = {"FwOp": Cutlass, "BwOp": Cutlass}
_FLASH = {"FwOp": Flash, "BwOp": Flash}
_OPERATORS = {
    "MemoryEfficientAttentionCutlassOp": (Cutlass, Cutlass),
    "MemoryEfficientAttentionCutlassFwdFlashBwOp": (Cutlass, Flash),
    "MemoryEfficientAttentionFlashAttentionOp": (Flash, Flash),
}
_ATTENTION = {
    **_FUNCTIONS,
    **_OPERATORS,
    "AttentionOpBase": Cutlass.__base__,
    "AttentionOp": tuple,
    "AttentionBias": functions.BIASES["AttentionBias"],
    "LowerTriangularMask": functions.BIASES["LowerTriangularMask"],
}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "xformers": {"__version__": LIBRARIES["xformers"].version},
    "xformers.ops": {**_ATTENTION, "AttentionMask": functions.BIASES["AttentionBias"]},
    "xformers.ops.fmha": {
        **_ATTENTION,
        "BlockDiagonalMask": functions.BIASES["BlockDiagonalMask"],
    },
    "xformers.ops.fmha.attn_bias": {
        **functions.BIASES,
        "VARLEN_BIASES": VARLEN,
        "_GappySeqInfo": GappySeqInfo,
        "_PaddedSeqLenInfo": PaddedSeqLenInfo,
        "_SeqLenInfo": SeqLenInfo,
    },
    "xformers.ops.fmha.cutlass": _CUTLASS,
    "xformers.ops.fmha.flash": _FLASH,
}
"""By the library's names."""
