"""``fully_shard``: its own operators are decomposed as CUDA runs them.

To a dispatch mode they are operators of a library, whose shape-only kernels would hide the memory
of the copies inside. The ``ShardedTensor`` of FSDP's state dictionaries is on the device of its
shards; one that queries the shards of every rank is refused.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.6 to 2.15;
torch/distributed/_shard/sharded_tensor/_ops/tensor_ops.py (``tensor_device``) and
sharded_tensor/api.py (``_init_from_local_shards``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.operators.chunks import numbers_of
from pytest_gpumem.values.errors import UnknownValueError

_COMPARING = (
    *("torch.distributed.fsdp.", "torch.distributed._state_dict_utils"),
    "torch.distributed.checkpoint.",
)
"""Modules that use an address to tell memory from none, and from other memory."""
_KERNELS: dict[str, str] = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
"""By operator: its kernel for CUDA, a function of Python."""


def bind(execution: ShapeExecution) -> None:
    """Make ``execution`` run the kernels for CUDA, and each operator in them separately."""

    def in_view(kernel: Callable[..., Any]) -> Handler:
        def handle(args: Args, kwargs: Kwargs) -> Any:
            with execution:
                return kernel(*args, **kwargs)

        return handle

    for operator, name in _KERNELS.items():
        kernel = getattr(torch.ops.fsdp, operator).default
        execution.bind(kernel, in_view(getattr(collectives, name)))
    # Since 2.15, written in C++: of gradients of one type, as most are, ``_chunk_cat``.
    mixed = getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", None)
    if mixed is not None:
        execution.bind(mixed.default, in_view(_concatenated))


def _concatenated(
    tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """Do as its kernel for CUDA: events seen on the dry device, for each mix of types."""
    types = {tensor.dtype for tensor in tensors}
    if types == {torch.bfloat16, torch.float32} and out.dtype == torch.float32:
        numbers = numbers_of(tensors, dim, num_chunks, out.element_size())
        torch.empty(numbers, dtype=torch.int64, device=out.device)
    else:
        given = tensors if len(types) == 1 else [tensor.to(out.dtype) for tensor in tensors]
        torch._chunk_cat(given, dim, num_chunks, out=out)


def add_patches(patches: Patches) -> None:
    """Give these modules comparable host addresses, where values of the memory are unknown."""
    for owner in (torch.UntypedStorage, torch.Tensor):
        planned = [
            value for each, name, value in patches.added if each is owner and name == "data_ptr"
        ]
        # A world that begins later has patches of its own, and finds the others applied.
        shown = planned[-1] if planned else owner.data_ptr
        patches.add(owner, "data_ptr", _compared(shown))
    patches.add(ShardedTensor, "device", property(_device))
    patches.add(ShardedTensor, "is_cuda", property(lambda this: _device(this).type == "cuda"))
    init = vars(ShardedTensor)["_init_from_local_shards"].__func__

    def initialize(cls: Any, /, *args: Any, process_group: Any = None, **kwargs: Any) -> Any:
        if dist.get_world_size(process_group) > 1:
            raise UnknownValueError(
                f"init_from_local_shards at {user_line()}, which LOCAL_STATE_DICT comes to, asks "
                "the other ranks where their shards lie: use SHARDED_STATE_DICT"
            )
        return init(cls, *args, process_group=process_group, **kwargs)

    patches.add(ShardedTensor, "_init_from_local_shards", classmethod(initialize))


def _device(tensor: ShardedTensor) -> torch.device:
    for shard in tensor.local_shards():
        return shard.tensor.device
    return torch.device("cuda", torch.cuda.current_device())


def _compared(shown: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(memory: Any) -> int:
        try:
            return shown(memory)
        except UnknownValueError:
            if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_COMPARING):
                raise
            storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
            return int(storage._cdata)  # as good a name for it as its address

    return data_ptr
