"""Functions of ``torch._C``, which torch's own Python on top calls."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import Patches


def add_functions(api: Any, patches: Patches) -> None:
    """Replace the functions of ``torch._C`` that ``api`` has, and the copies of their names.

    A build without CUDA has none of the ``_cuda_`` ones.
    """
    for name in dir(api):
        if name.startswith(("_cuda_", "_host_", "_graph_")) or (
            name.startswith("_accelerator_") and hasattr(torch._C, name)
        ):
            function = getattr(api, name)
            patches.add(torch._C, name, function)
            for module in (torch.cuda.graphs, torch.cuda.memory):
                if name in vars(module):
                    patches.add(module, name, function)
