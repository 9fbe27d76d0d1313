"""``torch.compile``: what it would fuse is not simulated, so compiled code runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.backends.mha
from torch._dynamo.eval_frame import OptimizedModule

from pytest_gpumem.simulated.callsite import user_line

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


def plan(simulation: Simulation, patches: Patches) -> None:
    """Keep fused code out: ``torch.compile`` and the fast path of transformer encoders."""

    def compile(model: Any = None, **options: Any) -> Any:
        simulation.note(
            f"torch.compile at {user_line()} runs eagerly on a simulated GPU: compiled code "
            f"allocates less"
        )
        return _wrapped if model is None else _wrapped(model)

    def fast_path_enabled() -> bool:
        if not torch.is_grad_enabled():
            simulation.note(
                "nn.TransformerEncoderLayer and nn.MultiheadAttention take their fast path on a "
                "GPU without gradients; it is simulated operator by operator"
            )
        return False

    patches.plan(torch, "compile", compile)
    patches.plan(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    # Nothing was compiled; torch would look for CUDA graphs to drop.
    patches.plan(torch._dynamo, "reset", lambda: None)
    patches.plan(torch.compiler, "reset", lambda: None)
    patches.plan(torch.backends.mha, "get_fastpath_enabled", fast_path_enabled)


def _wrapped(model: Any) -> Any:
    # Modules get torch's own wrapper, with its names of parameters; nothing is compiled.
    unchanged: Any = _unchanged
    return OptimizedModule(model, unchanged) if isinstance(model, torch.nn.Module) else model


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
