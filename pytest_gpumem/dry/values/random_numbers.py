"""Random numbers of CUDA's generators, drawn by a CPU generator.

The numbers are those of the simulated device: a CPU generator with the same seed draws them one
after the other. The state of a CUDA generator is its seed and an offset, which each operator
increases (``philox_cuda_state`` of aten/src/ATen/cuda/CUDAGeneratorImpl.cpp). So a restored state,
as in checkpointing, draws the same numbers again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

MOST_STATES = 1_000
"""The most states that are kept, of 5 KB each; a dropped state draws other numbers if restored."""

_State = tuple[int, int]
"""Seed and offset."""


class RandomNumbers:
    """Generators of the CPU, in the states of CUDA's."""

    def __init__(self) -> None:
        self._states: OrderedDict[_State, torch.Tensor] = OrderedDict()
        """States of the CPU generator by state of the CUDA generator."""
        self._before: _State | None = None
        self._source = torch.Generator("cpu")
        self._end: _State | None = None
        """The state of a CUDA generator after the last operator."""
        self._replaying: dict[torch.Generator, torch.Generator] = {}
        """CPU generators for a graph's generators, while it is replayed."""
        self.replayed: torch.Generator | None = None
        """The generator of the operator that a replay computes now."""

    def begin(self, generator: torch.Generator) -> None:
        """Set ``generator`` for the next operator's numbers."""
        self._before = _state_of(generator) if generator.device.type == "cuda" else None
        if self._end is not None:
            self._keep(self._end, self._source)
            self._end = None

    @contextmanager
    def replaying(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Draw inside the numbers of a graph's ``generators``, operator by operator.

        A replay increases their offsets only once, for all its operators.
        """
        for generator in generators:
            self.begin(generator)
            source = torch.Generator("cpu")
            self._set(source)
            self._replaying[generator] = source
        try:
            yield
        finally:
            for generator, source in self._replaying.items():
                self._keep(_state_of(generator), source)
            self._replaying.clear()

    def source_of(self, generator: torch.Generator) -> torch.Generator:
        """Return the CPU generator for an operator that has just used ``generator``."""
        if self._replaying and self.replayed is not None:
            return self._replaying[self.replayed]
        if generator.device.type != "cuda" or self._before is None:
            return generator
        self._set(self._source)
        self._end = _state_of(generator)
        return self._source

    def _set(self, source: torch.Generator) -> None:
        """Set ``source`` to the CPU state that belongs to the last state of the CUDA generator."""
        assert self._before is not None
        known = self._states.get(self._before)
        if known is not None:
            source.set_state(known)
        else:
            seed, offset = self._before
            source.manual_seed((seed + offset) % (1 << 63))

    def _keep(self, state: _State, source: torch.Generator) -> None:
        self._states[state] = source.get_state()
        if len(self._states) > MOST_STATES:
            self._states.popitem(last=False)


def share_state(first: torch.Generator, second: torch.Generator) -> bool:
    """Return whether two CUDA generators share a state, as after ``graphsafe_get_state``.

    This increases the offset of one and reads the other, which is not allowed during a capture.
    """
    before = first.get_state()
    if not torch.equal(before, second.get_state()):
        return False
    first.set_offset(first.get_offset() + 4)
    moved = second.get_offset() == first.get_offset()
    first.set_state(before)
    return moved


def _state_of(generator: torch.Generator) -> _State:
    return generator.initial_seed(), generator.get_offset()
