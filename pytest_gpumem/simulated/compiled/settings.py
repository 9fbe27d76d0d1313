"""Settings of Inductor's: what it would measure, and the processes that it would start."""

from __future__ import annotations

from typing import Any

TUNING = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
    "triton.autotune_at_compile_time",
)
"""Settings of Inductor that let it choose kernels by their speed."""

UNTUNED: dict[str, Any] = dict.fromkeys(TUNING, False)
"""Settings of Inductor where it writes a wrapper: nothing is measured."""

HELPERS = "get_compile_threads"
"""How Inductor asks in how many processes and threads it compiles kernels (async_compile.py)."""


def no_helpers() -> int:
    """Return that none helps: no kernel is compiled, and the threads of helpers never rest."""
    return 1
