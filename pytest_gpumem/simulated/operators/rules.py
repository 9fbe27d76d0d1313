"""What a CUDA operator allocates beyond its outputs: the shape of one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.simulated.common.callsite import provenance

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.simulated.gpu.device import SimulatedGPU

Before = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any]], "Scratch | None"]
"""May return what stays allocated until the operator ends."""
After = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any], Any], None]
ShapesOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Placed = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any], Any], "Iterable[torch.Tensor]"]


@dataclass(frozen=True)
class Rule:
    """What happens on the device before and after an operator's outputs are allocated."""

    before: Before | None = None
    after: After | None = None
    placed: Placed | None = None
    """The outputs that take device memory, in the order CUDA allocates them; by default all."""
    shapes: ShapesOf | None = None
    """Makes the outputs on ``meta`` where torch's own kernel for it gets them wrong."""


class Scratch:
    """Temporaries of one operator call; :meth:`free` gives back the newest first, as C++ does."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self._gpu = gpu
        self._addresses: list[int] = []
        self._estimated: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Allocate ``nbytes``; nothing, and address 0, for an empty tensor."""
        if not nbytes:
            return 0
        address = self._gpu.allocator.malloc(nbytes, self._gpu.stream)
        self._addresses.append(address)
        return address

    def estimate(self, nbytes: int, library: str, what: str) -> int:
        """Allocate a workspace of ``library`` whose size is an estimate.

        ``what`` it is for ends up in the notes of the simulation.
        """
        if not nbytes:
            return 0
        context = provenance()
        context.library = library
        address = self._gpu.allocator.malloc(nbytes, self._gpu.stream, context)
        self._addresses.append(address)
        self._estimated[address] = self._gpu.allocator.block(address)
        self._gpu.estimates.taken(self._estimated[address], f"{library}'s workspace for {what}")
        return address

    def drop(self, address: int) -> None:
        """Free one temporary early."""
        if address:
            self._addresses.remove(address)
            self._give_back(address)

    def free(self) -> None:
        """Free what is left, newest first."""
        while self._addresses:
            self._give_back(self._addresses.pop())

    def _give_back(self, address: int) -> None:
        self._gpu.allocator.free(address)
        nbytes = self._estimated.pop(address, 0) if self._estimated else 0
        if nbytes:
            self._gpu.estimates.freed(nbytes)


def current_gpu() -> SimulatedGPU:
    """The current CUDA device of the active simulation."""
    # The simulation installs these rules: it cannot be imported before them.
    from pytest_gpumem.simulated.simulation import active_simulation

    simulation = active_simulation()
    assert simulation is not None
    return simulation.current


def gpu_of(tensor: torch.Tensor) -> SimulatedGPU:
    """The device that holds ``tensor``."""
    gpu = current_gpu()
    record = gpu.simulation.storages.of(tensor) if len(gpu.simulation.gpus) > 1 else None
    return gpu if record is None else record.device


def passing(gpu: SimulatedGPU, *sizes: int) -> None:
    """Allocate ``sizes`` bytes one after the other, then free them, newest first."""
    scratch = Scratch(gpu)
    for nbytes in sizes:
        scratch.take(nbytes)
    scratch.free()
