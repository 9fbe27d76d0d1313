"""flash-attn 3.0.0: the modules that code imports, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.simulated.stand_ins.flash_attn_interface import functions
from pytest_gpumem.simulated.stand_ins.flash_attn_interface.kernels import (
    OPERATORS,
    get_scheduler_metadata,
)
from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES

_FUNCTIONS = {
    **{name: each for name, each in vars(functions).items() if name.startswith("flash_attn_")},
    "get_scheduler_metadata": get_scheduler_metadata,
}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "flash_attn_interface": {**_FUNCTIONS, **OPERATORS},
    "flash_attn_3": {"__version__": LIBRARIES["flash-attn-3"].version},
    "flash_attn_3.flash_attn_interface": {**_FUNCTIONS, **OPERATORS},
}
"""By the library's names."""
