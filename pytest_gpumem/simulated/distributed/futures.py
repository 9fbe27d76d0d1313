"""Futures of collectives: each callback runs on a stream of its own, which uses the results.

Source: aten/src/ATen/core/ivalue_inl.h (``ivalue::Future::invokeCallback``,
``synchronizeWithCurrentStreams``), torch 2.6 to 2.15: a callback gets a stream of the pool, and the
memory of the future's values is recorded as used on it, so that it is free again only when the
host has seen that stream's work done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine


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
