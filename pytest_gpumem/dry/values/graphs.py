"""Values in CUDA graphs: unchanged while a graph is captured, computed at each replay.

A graph refers to addresses: a replay runs the CPU kernels of its operators on the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.dry.values.dispatch import not_followed
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.dry.values.memory import Memory, MemoryRange, seen_by_cpu
from pytest_gpumem.dry.values.random_numbers import share_state
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.recording import Recorder, View
from pytest_gpumem.simulated.machine.values.views import view_of


class _Recording(Recorder[MemoryRange]):
    """The operators of one capture."""

    def __init__(self, memory: Memory, values: DryValues) -> None:
        super().__init__()
        self._values = values
        self._memory = memory

    def _place_of(self, tensor: torch.Tensor) -> MemoryRange:
        return self._memory.range_of(tensor)

    def _generator_of(self, kwargs: Kwargs) -> torch.Generator:
        generator = self._values.generator_of(kwargs.get("generator"))
        shared: torch.Generator = generator.graphsafe_get_state()
        return shared

    def _seen(self, view: View[MemoryRange], *, is_read: bool) -> torch.Tensor | None:
        place = _place_of(view)
        if not self._memory.holds(place):
            return None
        is_known = self._memory.knows(place) or self._values.holds_at(view.place[0])
        if is_read and place[1] and not is_known:
            return None
        return view_of(seen_by_cpu(view.place, view.layout.dtype), view.layout)

    def _run(
        self, operator: Operator, args: Args, kwargs: Kwargs, generator: torch.Generator | None
    ) -> Any:
        self._values.random.replayed = generator
        return self._values.run(operator, args, kwargs)

    def _mark_known(self, view: View[MemoryRange]) -> None:
        self._values.replayed(view.place[0], known=True)
        self._memory.mark_known(_place_of(view))

    _mark_uninitialized = _mark_known

    def _forget(self, view: View[MemoryRange]) -> None:
        self._values.replayed(view.place[0], known=False)
        self._memory.forget(_place_of(view))

    def generators(self) -> list[torch.Generator]:
        """Return the generators that operators draw from, each once."""
        return list({step.generator: None for step in self.steps if step.generator is not None})

    def merge_generators(self) -> None:
        """Replace generators that have the same state by one of them."""
        of_state: dict[Any, torch.Generator | None] = {None: None}
        for generator in self.generators():
            same = [other for other in of_state.values() if other and share_state(generator, other)]
            of_state[generator] = same[0] if same else generator
        self.steps = [replace(step, generator=of_state[step.generator]) for step in self.steps]


def _place_of(view: View[MemoryRange]) -> MemoryRange:
    """Return the place of the tensor itself, from its first to its last element."""
    layout = view.layout
    first = layout.offset * layout.dtype.itemsize
    return view.place[0] + first, layout.end - first if layout.shape.numel() else 0


class Graphs:
    """The operators of each capture of the process, in order."""

    def __init__(self, memory: Memory, values: DryValues) -> None:
        self._memory = memory
        self._values = values
        self._recordings: WeakKeyDictionary[Any, _Recording] = WeakKeyDictionary()
        self._under_way: list[_Recording] = []

    @contextmanager
    def replays_computed(self) -> Iterator[None]:
        """Compute the values of the graphs that run inside."""
        kind: Any = torch.cuda.CUDAGraph
        capture_begin, capture_end, replay = kind.capture_begin, kind.capture_end, kind.replay

        def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            capture_begin(graph, *args, **kwargs)
            self._recordings[graph] = _Recording(self._memory, self._values)
            self._under_way.append(self._recordings[graph])

        def end(graph: Any) -> None:
            recording = self._recordings.get(graph)
            if recording in self._under_way:
                self._under_way.remove(recording)
            capture_end(graph)
            if recording is not None:
                with not_followed():
                    recording.merge_generators()

        def replayed(graph: Any) -> None:
            recording = self._recordings.get(graph) or _Recording(self._memory, self._values)
            with self._values.random.replaying(recording.generators()):
                replay(graph)
                with not_followed(), torch.no_grad(), torch._C.DisableTorchFunction():
                    self._values.end()
                    recording.replay(computes=self._values.everything)

        patches = Patches()
        patches.add(kind, "capture_begin", begin)
        patches.add(kind, "capture_end", end)
        patches.add(kind, "replay", replayed)
        with patches.applied():
            yield

    def add(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Record an operator in a capture; its results are unknown until a replay."""
        if self._under_way:
            self._under_way[-1].add(operator, args, kwargs, result)

    def mark_unknown(self, tensor: torch.Tensor) -> None:
        """Forget the values of ``tensor``, which a kernel overwrites now or, in a graph, later."""
        if not torch.cuda.is_current_stream_capturing():
            self._values.mark_unknown(tensor)
        elif self._under_way and tensor.layout is torch.strided:
            self._under_way[-1].wrote([tensor])
