"""Results of collectives under the assumption that every rank sends the same.

Results of c10d's collectives without a function in the table are unknown, and so are those of
reductions that do not follow from one rank's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pytest_gpumem.simulated.common.raw import tensors_in


class Transfer(NamedTuple):
    """The tensors that one rank sends and receives."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    rank: int
    size: int
    operation: str
    """The reduction: ``SUM``, ``MAX``; empty if unknown."""
    root: int
    """The rank that receives a reduction: this one if all ranks do."""
    splits: Sequence[int]
    """Elements for each rank, where these are not equal parts."""
    received: Sequence[int]
    """Elements from each rank, likewise."""

    @classmethod
    def of(
        cls, collective: Collective, group: Any, given: Mapping[str, Any], operation: str
    ) -> Transfer:
        """Describe the call of a ``collective`` of ``group`` with the arguments ``given``."""
        return cls(
            list(tensors_in(given.get(collective.written))),
            list(tensors_in(given.get(collective.read))),
            group.rank(),
            group.size(),
            operation,
            given.get("root_rank", group.rank()),
            given.get("input_split_sizes") or (),
            given.get("output_split_sizes") or (),
        )


Write = Callable[[Transfer], None]
"""A function that writes the results of a collective."""


def unchanged(sent: Transfer) -> None:
    """Broadcast: the root has the same values."""


def reduced(sent: Transfer) -> None:
    """Multiply sums by the number of ranks; other reductions leave equal values as they are."""
    if sent.operation == "SUM" and sent.rank == sent.root:
        for tensor in sent.written:
            tensor.mul_(sent.size)


def exchanged(sent: Transfer) -> None:
    """Write, for each rank's part, what this rank sends to itself."""
    for source, target in zip(sent.read, sent.written, strict=True):
        own = (source.split(sent.splits) if sent.splits else source.chunk(sent.size))[sent.rank]
        _fill(target, own)


def gathered(sent: Transfer) -> None:
    """Write to every part what this rank sends."""
    for at, target in enumerate(sent.written):
        _fill(target, sent.read[at * len(sent.read) // len(sent.written)])


def kept(sent: Transfer) -> None:
    """Copy what the only rank of a group sends to its results, for any collective."""
    for source, target in zip(sent.read, sent.written, strict=False):
        target.view(source.shape).copy_(source)


def _fill(target: torch.Tensor, own: torch.Tensor) -> None:
    """Write ``own`` to each part of ``target``; it may be one of the parts itself, as in FSDP."""
    if own.numel():
        parts = target.view(-1, *own.shape)
        is_part = target.untyped_storage()._cdata == own.untyped_storage()._cdata
        for part in parts if is_part else (parts,):
            part.copy_(own)


_KNOWN_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "BAND", "BOR")
"""Reductions of equal values with a known result: all but the first leave them as they are."""


class Collective(NamedTuple):
    """The arguments that one operator of ``c10d`` writes and reads, by the names in its schema."""

    written: str = ""
    read: str = ""
    alike: Write | None = None
    """Function that writes the results if all ranks send the same; ``None`` if they are unknown."""
    flattened: str = ""
    """Lists of tensors of one size, which it copies from or to one tensor that holds them all."""

    def results(self, sent: Transfer) -> Write | None:
        """Return the function that writes the results; ``None`` where they do not follow."""
        if sent.operation == "PREMUL_SUM":  # also of one rank
            return None
        if sent.size == 1:
            return kept
        # A rank receives from each rank what it would send to that rank.
        if sent.received and (not sent.splits or set(sent.received) != {sent.splits[sent.rank]}):
            return None
        if self.alike is reduced and sent.operation not in _KNOWN_REDUCTIONS:
            return None
        return self.alike


BARRIER = "barrier"
COLLECTIVES: Mapping[str, Collective] = {
    "allreduce_": Collective("tensors", alike=reduced),
    "allreduce_coalesced_": Collective("tensors", alike=reduced),
    "reduce_": Collective("tensors", alike=reduced),
    "broadcast_": Collective("tensors", alike=unchanged),
    "allgather_": Collective("output_tensors", "input_tensors", gathered, "output_tensors"),
    "_allgather_base_": Collective("output_tensor", "input_tensor", gathered),
    "allgather_into_tensor_coalesced_": Collective("outputs", "inputs", gathered),
    "allgather_coalesced_": Collective("output_lists", "input_list"),
    "reduce_scatter_": Collective("output_tensors", "input_tensors", flattened="input_tensors"),
    "_reduce_scatter_base_": Collective("output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": Collective("outputs", "inputs"),
    "gather_": Collective("output_tensors", "input_tensors"),
    "scatter_": Collective("output_tensors", "input_tensors"),
    "alltoall_": Collective("output_tensors", "input_tensors"),
    "alltoall_base_": Collective("output", "input", exchanged),
    BARRIER: Collective(),
    "send": Collective(read="tensors"),
    "recv_": Collective("tensors"),
    "recv_any_source_": Collective("tensors"),
}
"""By the operator's name in ``torch.ops.c10d``."""
