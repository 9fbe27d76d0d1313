"""Sharded models: ``fully_shard``'s own operators run as the parts that CUDA runs.

To a dispatch mode they are operators of a library, whose shape-only kernels would hide the memory
of the copies inside. Allocations are named by their purpose, and DTensor propagates equal
shardings once. The ``ShardedTensor`` of FSDP's state dictionaries is on the device of its
shards; a call that asks for the shards of every rank is refused.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.6 to 2.15;
torch/distributed/_shard/sharded_tensor/_ops/tensor_ops.py (``tensor_device``) and
sharded_tensor/api.py (``_init_from_local_shards``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem.simulated.common.callsite import Purpose, running, user_line
from pytest_gpumem.simulated.common.patching import Patches, having
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.operators.chunks import numbers_of
from pytest_gpumem.values.errors import UnknownValueError

_COMPARING = (
    *("torch.distributed.fsdp.", "torch.distributed._state_dict_utils"),
    "torch.distributed.checkpoint.",
)
"""Modules that compare addresses, to tell memory from none, and from other memory."""
_KERNELS: dict[str, str] = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
"""By operator: its kernel for CUDA, a Python function."""


def bind(execution: ShapeExecution) -> None:
    """Make ``execution`` run the kernels for CUDA, and each operator in them separately."""

    def handler_of(kernel: Callable[..., Any]) -> Handler:
        def handle(args: Args, kwargs: Kwargs) -> Any:
            with execution:
                return kernel(*args, **kwargs)

        return handle

    for operator, name in _KERNELS.items():
        kernel = getattr(torch.ops.fsdp, operator).default
        execution.bind(kernel, handler_of(getattr(collectives, name)))
    # In C++ since 2.15; for gradients of one type, which is usual, it is ``_chunk_cat``.
    mixed = getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", None)
    if mixed is not None:
        execution.bind(mixed.default, handler_of(_concatenated))


def _concatenated(
    tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """Allocate as the CUDA kernel does: events seen on the dry device, for each mix of types."""
    types = {tensor.dtype for tensor in tensors}
    if types == {torch.bfloat16, torch.float32} and out.dtype == torch.float32:
        numbers = numbers_of(tensors, dim, num_chunks, out.element_size())
        torch.empty(numbers, dtype=torch.int64, device=out.device)
    else:
        given = tensors if len(types) == 1 else [tensor.to(out.dtype) for tensor in tensors]
        torch._chunk_cat(given, dim, num_chunks, out=out)


def add_patches(patches: Patches) -> None:
    """Give comparable addresses to those modules where the values of host memory are unknown."""
    _add_purposes(patches)
    patches.wrap(ShardingPropagator, "propagate_op_sharding_non_cached", _once_for_equal)
    for owner in (torch.UntypedStorage, torch.Tensor):
        planned = [
            value for each, name, value in patches.added if each is owner and name == "data_ptr"
        ]
        # A world that begins later has its own patches, and finds the earlier ones applied.
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
            return int(storage._cdata)  # identifies it as well as its address

    return data_ptr


_BUFFER, _UNSHARDED = "buffer", "unsharded"


_PURPOSES: tuple[tuple[Any, str, str, str], ...] = (
    (FSDPParamGroup, "unshard", "all-gather of {}", _BUFFER),
    (FSDPParamGroup, "wait_for_unshard", "unsharded parameters", _UNSHARDED),
    (FSDPParamGroup, "post_backward", "reduce-scatter of {}", _BUFFER),
    (_flat_param.FlatParamHandle, "pre_unshard", "shards to gather", _UNSHARDED),
    (_flat_param.FlatParamHandle, "unshard", "unsharded parameters", _UNSHARDED),
    (_runtime_utils, "_reduce_grad", "reduce-scatter", _BUFFER),
    (DistributedDataParallel, "_ddp_init_helper", "gradient buckets", _BUFFER),
    (Reducer, "_rebuild_buckets", "gradient buckets", _BUFFER),
)
"""Owner, function, name and kind of the purpose; the name may have the module's path."""


def _add_purposes(patches: Patches) -> None:
    """Set the purpose of allocations in these functions, whose operator is ``torch.empty``.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _flat_param.py and
    _runtime_utils.py of torch/distributed/fsdp, torch/nn/parallel/distributed.py, 2.6 to 2.13.
    """
    for owner, function, name, kind in _PURPOSES:
        if hasattr(owner, function):
            patches.wrap(owner, function, functools.partial(_doing, name, kind))


def _doing(
    name: str, kind: str, function: Callable[..., Any], first: Any, /, *args: Any, **kwargs: Any
) -> Any:
    path = getattr(first, "_module_fqn", None) or "the root"
    with having(running, "purpose", Purpose(name.format(path), kind)):
        return function(first, *args, **kwargs)


_OF_LISTS = "aten::_foreach_"


def _once_for_equal(propagate: Callable[..., Any], propagator: Any, schema: OpSchema) -> Any:
    """Propagate the sharding of equal elements of lists only once.

    An optimizer's ``_foreach_`` operators take lists of all parameters. torch propagates each one's
    sharding separately, in a time that grows with the square of their number; layers are alike.
    Source: torch/distributed/tensor/_sharding_prop.py (``propagate_op_sharding_non_cached``, the
    branch of ``TupleStrategy``), torch 2.13.
    """
    if not schema.op._schema.name.startswith(_OF_LISTS):
        return propagate(propagator, schema)
    lists: list[Any] = [arg for arg in schema.args_schema if _is_list(arg)]
    of_tensors = [arg for arg in lists if arg and isinstance(arg[0], DTensorSpec)]
    elements = list(zip(*of_tensors, strict=True))
    kinds = {element: kind for kind, element in enumerate(dict.fromkeys(elements))}
    if len(kinds) == len(elements):
        return propagate(propagator, schema)
    first = [elements.index(element) for element in kinds]
    found = propagate(propagator, _with(schema, len(elements), first))
    kind_of = [kinds[element] for element in elements]
    output, redistributed = found.output_spec, found.redistribute_schema
    if _is_list(output):
        found = replace(found, output_spec=_chosen(output, kind_of))
    if redistributed is not None:
        again = _with(redistributed, len(kinds), kind_of)
        found = replace(found, redistribute_schema=again)
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _with(schema: OpSchema, length: int, positions: Sequence[int]) -> OpSchema:
    """Return the call with only the elements at ``positions`` in its lists of this ``length``."""
    args = tuple(
        _chosen(arg, positions) if _is_list(arg) and len(arg) == length else arg  # type: ignore[arg-type]  # a list
        for arg in schema.args_schema
    )
    return OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info)


def _chosen(values: Any, positions: Sequence[int]) -> Any:
    return type(values)([values[position] for position in positions])
