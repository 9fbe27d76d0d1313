"""Autocast for CUDA: installed the first time it is switched on inside a simulation.

Methods of ``torch.autocast`` are replaced, too: Dynamo and AOTAutograd run them for the ``with``
statements of a compiled function, where the functions of ``torch`` are torch's own.

Each thread counts its contexts, and all threads share the cached casts. A GPU's nodes run on a
thread of the engine: if autocast is on around a backward pass, a context that a checkpoint
enters again for its block is the outermost one of that thread, and its end drops the
casts of all (aten/src/ATen/autocast_mode.cpp, ``nesting`` and ``clear_cache``).

Source: torch/amp/autocast_mode.py (``_enter_autocast``, ``_exit_autocast``) and
torch/_dynamo/variables/ctx_manager.py (``AutocastModeVariable``), torch 2.6 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.rules import within


def add_patches(cache: CastCache, patches: Patches) -> None:
    """Install autocast for CUDA at its first use; drop cached casts when torch drops its own."""
    open_on_engine = 0

    def set_enabled(set_enabled: Any, *args: Any) -> None:
        set_enabled(*args)
        enabled, device = (args[1], args[0]) if len(args) == 2 else (args[0], "cuda")
        if device == "cuda":
            within.passes_over = enabled
            if enabled:
                cache.install()

    def clear(clear: Any) -> None:
        cache.clear()
        clear()

    def enter(enter: Any, context: Any) -> Any:
        nonlocal open_on_engine
        if context._enabled and context.device == "cuda":
            cache.install()
        open_on_engine += _is_on_engine()
        return enter(context)

    def leave(leave: Any, context: Any, *error: Any) -> Any:
        nonlocal open_on_engine
        result = leave(context, *error)
        open_on_engine -= _is_on_engine()
        if not (open_on_engine if _is_on_engine() else _is_inside()):
            cache.clear()
        return result

    patches.wrap(autocast, "__enter__", enter)
    patches.wrap(autocast, "__exit__", leave)
    patches.wrap(torch, "set_autocast_enabled", set_enabled)
    patches.wrap(torch, "clear_autocast_cache", clear)
    if hasattr(torch, "set_autocast_gpu_enabled"):
        patches.wrap(torch, "set_autocast_gpu_enabled", set_enabled)


def _is_on_engine() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_inside() -> bool:
    """Return whether a context of autocast is open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0
