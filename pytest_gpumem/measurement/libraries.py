"""Memory that libraries keep on the device until the process ends: workspaces, masks, histories.

It is no leak of a test, like the workspaces of cuBLAS.

Source: Transformer Engine 2.8, pytorch/module/base.py (``get_workspace``), pytorch/fp8.py
(``FP8GlobalStateManager``) and pytorch/attention/dot_product_attention/utils.py and softmax.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
"""Modules, and the paths of the attributes that hold such memory."""


def kept_by_libraries() -> list[Any]:
    """Return the objects that imported libraries keep."""
    return [_found(sys.modules.get(name), path) for name, path in _KEPT]


def _found(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = getattr(value, name, None)
    return value


def releases_of(sites: Iterable[str], root: str) -> dict[str, str]:
    """Return the installed releases, by name, of the packages in which ``sites``, path:line, lie.

    Files under ``root`` are the project's own.
    """
    paths = {site.rpartition(":")[0] for site in sites}
    packages = {
        path.partition("/")[0].removesuffix(".py") for path in paths if not _own(path, root)
    }
    found = {package: _release(package) for package in sorted(packages)}
    return {package: release for package, release in found.items() if release}


@cache
def _own(path: str, root: str) -> bool:
    return not path or Path(root, path).exists()


@cache
def _release(package: str) -> str:
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):
        return ""
