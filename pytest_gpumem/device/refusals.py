"""Allocations that the caching allocator could not serve, as reported to its observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.sharing.refusal import Refusal

Observer = Callable[[int, int, int, int], object]
"""Called with device, bytes of the segment, allowed and free bytes (``OutOfMemoryObserver`` of
c10/core/CachingDeviceAllocator.h), after the allocator has let go of its lock."""


class _Relay:
    """The one observer of this process: torch has no call that removes an observer."""

    def __init__(self) -> None:
        self._present: list[Observer] = []
        self._attached = False

    def attach(self, observer: Observer) -> None:
        """Call ``observer`` from now on."""
        if not self._attached:
            attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # undeclared
            attach(self._tell)
            self._attached = True
        self._present.append(observer)

    def detach(self, observer: Observer) -> None:
        """Stop calling ``observer``."""
        self._present.remove(observer)

    def _tell(self, device: int, asked: int, allowed: int, free: int) -> None:
        for observer in tuple(self._present):
            observer(device, asked, allowed, free)


RELAY = _Relay()


@contextmanager
def reporting_to(
    attach: Callable[[Observer], Any],
    detach: Callable[[Observer], Any],
    note: Callable[[int, int, int], Refusal | None],
) -> Iterator[list[Refusal]]:
    """Yield the list that refusals inside are added to.

    ``note`` is called with the device's index, the requested bytes and the free bytes.
    """
    found: list[Refusal] = []

    def observe(device: int, asked: int, allowed: int, free: int) -> None:
        refusal = note(device, asked, free)
        if refusal is not None:
            found.append(refusal)

    attach(observe)
    try:
        yield found
    finally:
        detach(observe)
