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

ALONE: dict[str, Any] = {"compile_threads": 1}
"""Settings of Inductor as long as a GPU is simulated.

No kernel is compiled, and the threads of helpers would never rest while somebody else compiles.
"""
