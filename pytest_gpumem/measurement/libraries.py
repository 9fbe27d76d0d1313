"""What libraries keep on the device until their process ends: workspaces, masks, histories.

It is a leak of no test, as the workspaces of cuBLAS are none.

Source: Transformer Engine 2.8, pytorch/module/base.py (``get_workspace``), pytorch/fp8.py
(``FP8GlobalStateManager``) and pytorch/attention/dot_product_attention/utils.py and softmax.py.
"""

from __future__ import annotations

import sys
from typing import Any

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_KEPT = (
    ("transformer_engine.pytorch.module.base", ("_cublas_workspace",)),
    ("transformer_engine.pytorch.module.base", ("_multi_stream_cublas_workspace",)),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_amax_buffer")),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_amax_history_buffer")),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_scale_buffer")),
    (f"{_ATTENTION}.utils", ("_cu_seqlens_cache",)),
    (f"{_ATTENTION}.softmax", ("_default_causal_mask",)),
    (f"{_ATTENTION}.dot_product_attention", ("_alibi_cache",)),
)
"""Modules, and where in them it is."""


def kept_by_libraries() -> list[Any]:
    """Return the objects that imported libraries keep."""
    return [_found(sys.modules.get(name), path) for name, path in _KEPT]


def _found(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = getattr(value, name, None)
    return value
