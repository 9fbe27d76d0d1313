"""Autocast for CUDA: installed the first time it is switched on inside a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.operators.autocast import CastCache


def plan(cache: CastCache, patches: Patches) -> None:
    """Notice autocast for CUDA, and drop its cached casts when torch drops its own."""
    set_enabled = torch.set_autocast_enabled
    set_gpu_enabled = getattr(torch, "set_autocast_gpu_enabled", None)
    clear = torch.clear_autocast_cache

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        enabled, device = (args[1], args[0]) if len(args) == 2 else (args[0], "cuda")
        if enabled and device == "cuda":
            cache.install()

    def clear_autocast_cache() -> None:
        cache.clear()
        clear()

    patches.plan(torch, "set_autocast_enabled", set_autocast_enabled)
    patches.plan(torch, "clear_autocast_cache", clear_autocast_cache)
    if set_gpu_enabled is not None:
        patches.plan(torch, "set_autocast_gpu_enabled", set_autocast_enabled)
