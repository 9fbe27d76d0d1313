"""What a CUDA operator allocates beyond its outputs: the shape of one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.simulated.device import SimulatedGPU

Before = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any]], "Scratch | None"]
"""May return what stays allocated until the operator ends."""
After = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any], Any], None]
Placed = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any], Any], "Iterable[torch.Tensor]"]


@dataclass(frozen=True)
class Rule:
    """What happens on the device before and after an operator's outputs are allocated."""

    before: Before | None = None
    after: After | None = None
    placed: Placed | None = None
    """The outputs that take device memory, in the order CUDA allocates them; by default all."""


class Scratch:
    """Temporaries of one operator call; :meth:`free` gives back the newest first, as C++ does."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self._gpu = gpu
        self._addresses: list[int] = []

    def take(self, nbytes: int) -> int:
        """Allocate ``nbytes``; nothing, and address 0, for an empty tensor."""
        if not nbytes:
            return 0
        address = self._gpu.allocator.malloc(nbytes, self._gpu.stream)
        self._addresses.append(address)
        return address

    def drop(self, address: int) -> None:
        """Free one temporary early."""
        if address:
            self._addresses.remove(address)
            self._gpu.allocator.free(address)

    def free(self) -> None:
        """Free what is left, newest first."""
        while self._addresses:
            self._gpu.allocator.free(self._addresses.pop())


def passing(gpu: SimulatedGPU, *sizes: int) -> None:
    """Allocate ``sizes`` bytes one after the other, then free them, newest first."""
    scratch = Scratch(gpu)
    for nbytes in sizes:
        scratch.take(nbytes)
    scratch.free()
