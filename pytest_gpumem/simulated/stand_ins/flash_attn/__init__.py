"""flash-attn 2.8.3: the modules that code imports, and their contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.flash_attn import functions, layers, padding, rotary
from pytest_gpumem.simulated.stand_ins.flash_attn.extension import EXTENSION
from pytest_gpumem.simulated.stand_ins.flash_attn.kernels import OPERATORS
from pytest_gpumem.simulated.stand_ins.libraries import FLASH_ATTN

_FUNCTIONS = {
    name: function for name, function in vars(functions).items() if name.startswith("flash_attn_")
}
_ROTARY = {"apply_rotary": layers.apply_rotary}
_CROSS_ENTROPY = {"cross_entropy_loss": layers.cross_entropy_loss}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "flash_attn": {"__version__": FLASH_ATTN.version, **_FUNCTIONS},
    "flash_attn.flash_attn_interface": {
        **_FUNCTIONS,
        **OPERATORS,
        **{f"_wrapped{name}": operator for name, operator in OPERATORS.items()},
        "flash_attn_gpu": EXTENSION,
    },
    "flash_attn.bert_padding": {
        name: getattr(padding, name)
        for name in (
            "IndexFirstAxis",
            "IndexPutFirstAxis",
            "index_first_axis",
            "index_put_first_axis",
            "unpad_input",
            "pad_input",
        )
    },
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {
        "ApplyRotaryEmb": layers.ApplyRotaryEmb,
        "apply_rotary_emb": layers.apply_rotary_emb,
        "apply_rotary_emb_func": layers.apply_rotary_emb,
        "apply_rotary_emb_qkv_": rotary.apply_rotary_emb_qkv_,
        "apply_rotary_emb_kv_": rotary.apply_rotary_emb_kv_,
        "RotaryEmbedding": rotary.RotaryEmbedding,
        **_ROTARY,
    },
    "flash_attn.losses": {},
    "flash_attn.losses.cross_entropy": {
        "CrossEntropyLoss": layers.CrossEntropyLoss,
        **_CROSS_ENTROPY,
    },
    "flash_attn_2_cuda": vars(EXTENSION),
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": _ROTARY,
    "flash_attn.ops.triton.cross_entropy": {
        "CrossEntropyLoss": layers.CrossEntropy,
        **_CROSS_ENTROPY,
    },
}
"""By the library's names."""
