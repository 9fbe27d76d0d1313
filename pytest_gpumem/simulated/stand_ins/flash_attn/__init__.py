"""flash-attn 2.8.3: the modules that code imports, and their contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.flash_attn import functions
from pytest_gpumem.simulated.stand_ins.flash_attn.functions import FUNCTIONS
from pytest_gpumem.simulated.stand_ins.flash_attn.kernels import OPERATORS
from pytest_gpumem.simulated.stand_ins.imports import VERSION

MODULES: Mapping[str, Mapping[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **FUNCTIONS},
    "flash_attn.flash_attn_interface": {
        **FUNCTIONS,
        **OPERATORS,
        **{f"_wrapped{name}": operator for name, operator in OPERATORS.items()},
    },
    "flash_attn.bert_padding": {
        name: getattr(functions, name)
        for name in (
            *("IndexFirstAxis", "IndexPutFirstAxis", "index_first_axis", "index_put_first_axis"),
            *("unpad_input", "pad_input"),
        )
    },
}
"""By the library's names."""
