"""Several GPUs: C++ code that the mode does not see, and operations without support here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.nn.parallel import comm

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import refuse, refusing
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.placement import return_gradient

_BEGIN_WITH_A_FACTORY = (
    (torch._C._nn, "one_hot"),
    (nn.functional, "one_hot"),
    (torch._C._nn, "pad_sequence"),
    *((place, name) for place in (torch, torch.Tensor) for name in ("quantile", "nanquantile")),
    *((place, name) for place in (torch, torch.Tensor) for name in ("cov", "corrcoef")),
)
"""Composite functions whose first step gets only the options of their arguments."""

_OF_COMM = (
    *("_broadcast", "_broadcast_out", "_broadcast_coalesced", "_scatter_out", "_gather_out"),
)
"""Functions of ``torch._C`` below torch.nn.parallel.comm, which builds without CUDA lack."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace functions that see all GPUs as one, and refuse those that need real ones."""
    for name in _OF_COMM:
        patches.add(torch._C, name, refusing(f"torch.nn.parallel.comm.{name[1:]}", _WHY))
    for name in ("reduce_add", "reduce_add_coalesced"):  # in Python, but for NCCL's
        patches.wrap(comm, name, functools.partial(_reduce, name))

    def begin(
        initialize: Any, this: Any, module: Any, device_ids: Any = None, *args: Any, **options: Any
    ) -> None:
        if len(machine.gpus if device_ids is None else device_ids) > 1:
            refuse("nn.DataParallel over several GPUs", _WHY)
        initialize(this, module, device_ids, *args, **options)

    patches.wrap(nn.DataParallel, "__init__", begin)
    patches.add(torch._C, "_scatter", _scatter)
    patches.add(torch._C, "_gather", _gather)
    placement = machine.placement
    if placement is None:
        return
    patches.add(torch.Tensor, "copy_", _copying(machine))

    def followed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        placement.follow(args, kwargs)
        return function(*args, **kwargs)

    for owner, name in _BEGIN_WITH_A_FACTORY:
        patches.wrap(owner, name, followed)


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any
) -> list[torch.Tensor]:
    """Return ``tensor``, moved to a single GPU, as its only part.

    Source: torch/csrc/cuda/comm.cpp (scatter), torch 2.6 to 2.15.
    """
    if len(devices) != 1:
        refuse("torch.nn.parallel.comm.scatter", _WHY)
    (part,) = tensor.chunk(1, dim) if sizes is None else tensor.split_with_sizes(sizes, dim)
    if devices[0] == part.get_device():
        return [part]
    with torch.cuda.stream(streams[0] if streams else None):
        return [part.to(torch.device("cuda", devices[0]), non_blocking=True)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    """Return a copy of a single tensor on the GPU ``destination``, on the host if that is -1.

    Source: torch/csrc/cuda/comm.cpp (gather), torch 2.6 to 2.15.
    """
    if len(tensors) != 1:
        refuse("torch.nn.parallel.comm.gather", _WHY)
    part = tensors[0]
    gpu = torch.cuda.current_device() if destination is None else destination
    device = torch.device("cpu") if gpu == -1 else torch.device("cuda", gpu)
    form = suggest_memory_format(part)
    result = torch.empty(part.shape, dtype=part.dtype, device=device, memory_format=form)
    return result.copy_(part, non_blocking=result.is_cuda)


def _reduce(name: str, reduce: Callable[..., Any], inputs: Any, *args: Any, **options: Any) -> Any:
    if any(raw.is_on_device(tensor) for tensor in raw.tensors_in(inputs)):
        refuse(f"torch.nn.parallel.comm.{name}", _WHY)
    return reduce(inputs, *args, **options)


_WHY = (
    "copies between GPUs in code of its own, which a simulated GPU "
    'does not have: test the model on one GPU, or place its parts with .to("cuda:1")'
)


def _copying(machine: SimulatedMachine) -> Callable[..., torch.Tensor]:
    copy: Callable[..., torch.Tensor] = raw.base("copy_")

    @functools.wraps(torch.Tensor.copy_)
    def copy_(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = copy(tensor, *args, **kwargs)
        for source in (*args, *kwargs.values()):
            other = _other_gpu(machine, source, tensor)
            if other is not None:
                return_gradient(copied, other, position=1)
        return copied

    return copy_


def copied_to_gpu_of(machine: SimulatedMachine, tensor: torch.Tensor, value: Any) -> Any:
    """Return what to write into ``tensor``: ``value``, copied if it is on another GPU.

    The copy that ``tensor[index] = value`` makes in C++ would not bring the gradient back.
    """
    return value if _other_gpu(machine, value, tensor) is None else value.to(tensor.device)


def _other_gpu(machine: SimulatedMachine, value: Any, tensor: torch.Tensor) -> GpuState | None:
    """Return the GPU of ``value``, if it has a gradient and is on another one than ``tensor``."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    target, source = machine.storages.of(tensor), machine.storages.of(value)
    if target is None or source is None or target.device is source.device:
        return None
    return source.device
