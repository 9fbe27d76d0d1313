"""Parts of torch that need a real device: refused by name, or without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.export
from torch import nn

from pytest_gpumem.simulated.callsite import user_line
from pytest_gpumem.simulated.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace what would abort or complain of a missing driver."""
    patches.plan(torch.export, "export", _refusing("torch.export.export"))
    for module in (torch.cuda, torch.cuda.graphs):
        patches.plan(module, "CUDAGraph", _refusing("torch.cuda.CUDAGraph"))
    patches.plan(torch.cuda.nvtx, "_nvtx", _Ranges())
    # With one device DataParallel only calls its module.
    patches.plan(nn.DataParallel, "forward", _call_module)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperatorError(
            f"{name} at {user_line()} needs a real CUDA device, so it cannot run on a simulated GPU"
        )

    return refuse


def _call_module(parallel: nn.DataParallel[nn.Module], *inputs: Any, **options: Any) -> Any:
    return parallel.module(*inputs, **options)


class _Ranges:
    """``torch._C._nvtx``: ranges for a profiler that is not there."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0
