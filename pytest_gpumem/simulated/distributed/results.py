"""The results of collectives: their values where every rank's are known, and their futures.

Each callback of a future runs on a stream of its own, which uses the results: it gets a stream of
the pool, and the memory of the future's values is recorded as used on it, so that it is free again
only when the host has seen that stream's work done. Source: aten/src/ATen/core/ivalue_inl.h
(``ivalue::Future::invokeCallback``, ``synchronizeWithCurrentStreams``), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from pytest_gpumem.simulated.machine.machine import SimulatedMachine


class Transfer(NamedTuple):
    """The tensors that one rank sends and receives."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    rank: int
    size: int
    operation: str
    """The reduction: ``SUM``, ``MAX``; empty if unknown."""
    splits: Sequence[int]
    """Elements for each rank, where these are not equal parts."""


def unchanged(sent: Transfer) -> None:
    """Broadcast: the root has the same values."""


def reduced(sent: Transfer) -> None:
    """Multiply sums by the number of ranks; other reductions leave equal values as they are."""
    for tensor in sent.written:
        if sent.operation == "SUM":
            tensor.mul_(sent.size)


def exchanged(sent: Transfer) -> None:
    """Write for each rank's part what this rank sends itself."""
    for source, target in zip(sent.read, sent.written, strict=True):
        own = (source.split(sent.splits) if sent.splits else source.chunk(sent.size))[sent.rank]
        target.view(sent.size, *own.shape).copy_(own)


def gathered(sent: Transfer) -> None:
    """Write to every part what this rank sends."""
    parts = len(sent.written) // len(sent.read)
    for position, tensor in enumerate(sent.written):
        source = sent.read[position // parts]
        tensor.view(-1, *source.shape).copy_(source)


def kept(sent: Transfer) -> None:
    """Write what the only rank of a group sends to its own results, for any collective."""
    for source, target in zip(sent.read, sent.written, strict=False):
        target.view(source.shape).copy_(source)


class DoneFuture(Future[Any]):
    """The future of a collective that is already done, with its results."""

    def __init__(self, machine: SimulatedMachine, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._machine = machine
        self._results = results
        self.set_result(list(results))

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Run ``callback`` at once, on a stream of the pool."""

        def on_stream(future: Future[Any]) -> Any:
            machine = self._machine
            device = machine.current_index
            before, stream = machine.streams.current(device), machine.streams.make(device, 0)
            machine.streams.choose(device, stream)
            try:
                for tensor in self._results:
                    record = machine.storages.of(tensor)
                    if record is not None and record.address:
                        record.allocator.record_stream(record.address, stream, device)
                return callback(future)
            finally:
                machine.streams.choose(device, before)

        return super().then(on_stream)
