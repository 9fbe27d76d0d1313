"""Processes that are forked off a simulation, as workers of a DataLoader: they have no GPU.

On a GPU the driver's state does not survive a fork, and torch raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Kwargs
from pytest_gpumem.simulated.machine.storages import Storages

IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""Source: torch/cuda/__init__.py (_lazy_init), torch 2.6 to 2.15."""
_UNKNOWN = (
    "a forked process, such as a worker of a DataLoader, read a CPU tensor that was copied from a "
    "simulated GPU, which holds no values: read it in the process of the test (num_workers=0)"
)


def after_fork(call: Callable[[], None]) -> None:
    """Call ``call`` in every process that is forked from here on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def check(storages: Storages, args: Any, kwargs: Kwargs, target: Any) -> None:
    """Raise torch's error for an operator of a GPU in a forked process.

    ``target`` is where ``Tensor.to`` moves a tensor, if it does.
    """
    device = target or kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "cuda":
        raise RuntimeError(IN_CHILD)
    for tensor in tensors_in((args, kwargs)):
        if storages.of(tensor) is not None:
            raise RuntimeError(IN_CHILD)
        if storages.is_on_host(tensor):
            raise RuntimeError(_UNKNOWN)
