"""Collectives of c10d: the other ranks are taken to send what this one does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.memory import Memory
from pytest_gpumem.dry.values.parts import Parts
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, named


class Collective(Parts):
    """A collective of a process group."""

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
        name = self._func._opname
        is_alone = group.size() == 1 and not name.startswith("recv")
        write = _WRITES.get(name, _take if is_alone and not _scales(given) else None)
        with torch.no_grad():
            if write is None or not write(group, given, list(args), self._memory.reduction()):
                super()._write(result, args, kwargs)


def _known(group: Any) -> Any:
    return torch._C._distributed_c10d.ProcessGroup.unbox(group)


def _scales(given: Mapping[str, Any]) -> bool:
    """Return whether a reduction multiplies what each rank sends by a number."""
    kind: Any = torch._C._distributed_c10d.ReduceOp
    reduction = given.get("reduce_op")
    return reduction is not None and kind.unbox(reduction).op == kind.PREMUL_SUM


_Write = Callable[[Any, Mapping[str, Any], Sequence[Any], int], bool]
"""(group, arguments by name and in order, NCCL's reduction) -> whether the results are known.

Tensors are written to as ``data``, whose version autograd does not check.
"""
_SUM, _PRODUCT, _AVERAGE = 0, 1, 4
"""``ncclRedOp_t`` of nccl.h; between the last two are the extremes."""


def _take(group: Any, given: Mapping[str, Any], args: Sequence[Any], _: int) -> bool:
    """Write what the only rank of a group sends to what it receives."""
    received, sent = (list(tensors_in(each)) for each in args[:2])
    for target, source in zip(received, sent, strict=True) if sent else ():
        target.data.view_as(source).copy_(source)
    return True


def _is_unchanged(group: Any, given: Mapping[str, Any], args: Sequence[Any], _: int) -> bool:
    return True


def _reduce(group: Any, given: Mapping[str, Any], args: Sequence[Any], operation: int) -> bool:
    if group.rank() != given.get("root_rank", group.rank()):
        return True
    if operation == _SUM:
        for tensor in tensors_in(given["tensors"]):
            tensor.data.mul_(group.size())
    is_kept = operation != _PRODUCT or group.size() == 1
    return is_kept and operation <= _AVERAGE


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
