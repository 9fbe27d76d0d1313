"""Operators composed of others, which are followed: custom operators and those of c10d."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.memory import Memory
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, named
from pytest_gpumem.simulated.machine.values.operator import Operator

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Parts:
    """An operator composed of others that are followed; a library's results are unknown."""

    def __init__(self, func: Any, graphs: Graphs | None) -> None:
        self._func = func
        is_python = func._schema.name in OPDEFS
        self._graphs = None if is_python else graphs
        self._operator = Operator.of(func)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the kernel at the key below, not this one again."""
        func = self._func
        if is_composite(func):
            result = func._op_dk(_COMPOSITE, *args, **kwargs)
        else:  # a kernel in Python, which torch calls by a set of keys only
            keys = torch._C.DispatchKeySet(_key_of(args, kwargs))
            result = func.redispatch(keys, *args, **kwargs)
        self._write(result, args, kwargs)
        return result

    def _write(self, result: Any, args: Args, kwargs: Kwargs) -> None:
        """Note what it has written."""
        if self._graphs is not None:
            for tensor in tensors_in((result, self._operator.targets(args, kwargs))):
                if tensor.is_cuda:
                    self._graphs.mark_unknown(tensor)


class _Collective(Parts):
    """A collective of c10d: the other ranks are taken to send what this one does."""

    def __init__(self, func: Any, graphs: Graphs, memory: Memory) -> None:
        super().__init__(func, graphs)
        self._memory = memory

    def _write(self, result: Any, args: Args, kwargs: Kwargs) -> None:
        given = named(self._func, args, kwargs)
        group = _known(given["process_group"])
        on_gpu = any(tensor.is_cuda for tensor in tensors_in(args))
        # Gloo's own threads copy its results, later than this, and as any copy is made:
        # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, torch 2.6 to 2.15.
        if not on_gpu or str(group._get_backend(torch.device("cuda")).name()) == "gloo":
            return
        write = _WRITES.get(self._func._opname)
        with torch.no_grad():
            if write is None or not write(group, given, list(args), self._memory.reduction()):
                super()._write(result, args, kwargs)


def _known(group: Any) -> Any:
    return torch._C._distributed_c10d.ProcessGroup.unbox(group)


_Write = Callable[[Any, Mapping[str, Any], Sequence[Any], int], bool]
"""(group, arguments by name and in order, NCCL's reduction) -> whether the results are known.

Tensors are written to as ``data``, whose version autograd does not check.
"""
_SUM, _PRODUCT, _AVERAGE = 0, 1, 4
"""``ncclRedOp_t`` of nccl.h; between the last two are the extremes."""


def _is_unchanged(group: Any, given: Mapping[str, Any], args: Sequence[Any], _: int) -> bool:
    return True


def _reduce(group: Any, given: Mapping[str, Any], args: Sequence[Any], operation: int) -> bool:
    if group.rank() != given.get("root_rank", group.rank()):
        return True
    if operation == _SUM:
        for tensor in tensors_in(given["tensors"]):
            tensor.data.mul_(group.size())
    return operation == _SUM or _PRODUCT < operation <= _AVERAGE


def _gather(group: Any, given: Mapping[str, Any], args: Sequence[Any], _: int) -> bool:
    """Write to every part what this rank sends, part by part: FSDP sends one of them."""
    received, sent = (list(tensors_in(each)) for each in args[:2])
    for at, target in enumerate(received):
        source = sent[at * len(sent) // len(received)]
        for part in target.data.view(-1, *source.shape):
            part.copy_(source)
    return True


def _exchange(group: Any, given: Mapping[str, Any], args: Sequence[Any], _: int) -> bool:
    """Write for each rank's part what this rank sends itself, if these are of one length."""
    (target, source), rank = args[:2], group.rank()
    splits, received = given["input_split_sizes"], given["output_split_sizes"]
    if received and (not splits or set(received) != {splits[rank]}):
        return False
    own = (source.split(splits) if splits else source.chunk(group.size()))[rank]
    for part in target.data.view(-1, *own.shape) if own.numel() else ():
        part.copy_(own)
    return True


_WRITES: Mapping[str, _Write] = {
    **dict.fromkeys(("broadcast_", "barrier"), _is_unchanged),
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "reduce_"), _reduce),
    **dict.fromkeys(
        ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), _gather
    ),
    "alltoall_base_": _exchange,
}


_OF_C10D = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operators that are composed of those of c10d."""


def of_library(func: Any, graphs: Graphs, memory: Memory) -> Parts:
    """Return the handler of an operator that is not torch's own."""
    is_collective = any(each.name == "process_group" for each in func._schema.arguments)
    if func.namespace == "c10d" and is_collective:
        return _Collective(func, graphs, memory)
    return Parts(func, None if func.namespace in _OF_C10D else graphs)


def is_composite(func: Any) -> bool:
    """Return whether torch composes ``func`` of others on a GPU, unlike ``silu_backward``."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE.name) and not has_kernel(func.name(), "CUDA")


def _key_of(args: Args, kwargs: Kwargs) -> Any:
    """Return the backend that runs an operator of other libraries."""
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((args, kwargs)))
    device = kwargs.get("device")
    on_gpu = on_gpu or (isinstance(device, torch.device) and device.type == "cuda")
    return torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU
