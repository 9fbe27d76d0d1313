"""Values in CUDA graphs: unchanged while a graph is captured, computed at each replay.

A graph is addresses. Operators are remembered with the places that they read and write, not with
their tensors, so that memory is freed as on a GPU, and a replay runs their CPU kernels there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.dry.values.dispatch import unseen
from pytest_gpumem.dry.values.known import DryValues, end_of
from pytest_gpumem.dry.values.memory import Memory, Place, seen_by_cpu
from pytest_gpumem.dry.values.random_numbers import share_state
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import (
    Layout,
    is_written,
    layout_of,
    layouts_in,
    mapped,
    view_of,
)

_REQUESTS = ("capture_begin", "capture_end", "replay")


@dataclass(frozen=True)
class _View(Layout):
    """A tensor of captured work, and the place of its storage."""

    storage: Place

    @property
    def end(self) -> int:
        """The first byte behind it, from the beginning of the storage; 0 without elements."""
        return end_of(self) if self.shape.numel() else 0

    @property
    def place(self) -> Place:
        """The place of the tensor itself, from its first to its last element."""
        first = self.offset * self.dtype.itemsize
        return self.storage[0] + first, max(self.end - first, 0)

    def seen(self) -> torch.Tensor:
        """Return the memory as a CPU tensor."""
        return view_of(seen_by_cpu(self.storage, self.dtype), self)


@dataclass(frozen=True)
class _Step:
    operator: Operator | None
    """``None`` for a kernel of which nothing is known but its targets."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    targets: tuple[_View, ...]
    generator: torch.Generator | None = None
    """One that has the state from which random numbers are drawn, whatever state the program's
    generator has later."""

    @property
    def written(self) -> Sequence[_View]:
        """All tensors that change."""
        return *self.targets, *layouts_in(self.result, _View)


class Graphs:
    """The operators of the captures of one process, each in their order."""

    def __init__(self, memory: Memory, values: DryValues) -> None:
        self._memory = memory
        self._values = values
        self._steps: WeakKeyDictionary[Any, list[_Step]] = WeakKeyDictionary()
        self._under_way: list[list[_Step]] = []

    @contextmanager
    def replays_computed(self) -> Iterator[None]:
        """Compute the values of the graphs that run inside."""
        patches = Patches()
        kind = torch.cuda.CUDAGraph
        for name in _REQUESTS:
            patches.add(kind, name, self._handled(getattr(kind, name), name))
        patches.apply()
        try:
            yield
        finally:
            patches.undo()

    def _handled(self, function: Any, name: str) -> Any:
        def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(graph, *args, **kwargs)
            self._under_way.append(self._steps.setdefault(graph, []))
            self._under_way[-1].clear()
            return result

        def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._steps.get(graph)
            self._under_way = [other for other in self._under_way if other is not steps]
            result = function(graph, *args, **kwargs)
            with unseen():
                _merge_generators(steps or [])
            return result

        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._steps.get(graph, [])
            with self._values.random.replaying(_generators(steps)):
                result = function(graph, *args, **kwargs)
                with unseen(), torch.no_grad(), torch._C.DisableTorchFunction():
                    self._values.end()
                    for step in steps:
                        self._repeat(step)
            return result

        return {"capture_begin": begin, "capture_end": end, "replay": replay}[name]

    def add(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Remember a call of a capture, whose results are unknown until it is replayed."""
        if operator.moves_views or not self._under_way:
            return
        targets = tuple(self._described(tensor) for tensor in operator.targets(args, kwargs))
        described = self._described
        generator = None
        if operator.random:
            own = self._values.generator_of(kwargs.get("generator"))
            generator = own.graphsafe_get_state()
        self._under_way[-1].append(
            _Step(
                operator, described(args), described(kwargs), described(result), targets, generator
            )
        )

    def lost(self, tensor: torch.Tensor) -> None:
        """Forget the values of ``tensor``, to which a kernel writes unknown ones now, or later."""
        if not torch.cuda.is_current_stream_capturing():
            self._values.lost(tensor)
        elif self._under_way and tensor.layout is torch.strided:
            self._under_way[-1].append(_Step(None, (), {}, None, (self._described(tensor),)))

    def _described(self, value: Any) -> Any:
        return mapped(value, self._part)

    def _part(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_cuda or value.layout is not torch.strided:
                return value
            return _View(*layout_of(value), self._memory.place_of(value))
        return CPU if isinstance(value, torch.device) else value

    def _repeat(self, step: _Step) -> None:
        operator = step.operator
        if operator is None or not self._values.everything:
            self._forget(step.written)
            return
        if operator.blank:
            for view in layouts_in(step.result, _View):
                self._know(view)  # it may be written to in part
            return
        try:
            spared = step.targets if operator.overwrites else ()
            args, kwargs = self._real((step.args, step.kwargs), operator, spared)
        except KeyError:  # a number that is not known
            self._forget(step.written)
            return
        self._values.random.replayed = step.generator
        computed = self._values.run(operator, args, kwargs)
        if computed is None:
            self._forget(step.written)
            return
        for target in step.targets:
            self._know(target)
        self._write(step.result, computed, {target.storage for target in step.targets})

    def _real(self, value: Any, operator: Operator, spared: tuple[_View, ...]) -> Any:
        """Return ``value`` with the CPU's tensors; raises ``KeyError`` for unknown numbers."""

        def real(part: Any) -> Any:
            if not isinstance(part, _View):
                return part
            is_read = part.end and not operator.shaped_like and part not in spared
            if not self._memory.holds(part.place):
                raise KeyError
            if is_read and not self._is_known(part):
                raise KeyError
            return part.seen()

        return mapped(value, real)

    def _is_known(self, view: _View) -> bool:
        return self._memory.knows(view.place) or self._values.holds_at(view.storage[0])

    def _write(self, result: Any, computed: Any, written: set[Place]) -> None:
        if isinstance(result, _View):
            if result.storage in written or not self._memory.holds(result.place):
                return
            if is_written(result.seen(), computed):
                self._know(result)
            else:
                self._forget((result,))
        elif isinstance(result, (list, tuple)):
            given = computed if isinstance(computed, (list, tuple)) else [None] * len(result)
            for one, other in zip(result, given, strict=False):
                self._write(one, other, written)

    def _know(self, view: _View) -> None:
        self._values.replayed(view.storage[0], known=True)
        self._memory.know(view.place)

    def _forget(self, views: Sequence[_View]) -> None:
        for view in views:
            self._values.replayed(view.storage[0], known=False)
            self._memory.forget(view.place)


def _generators(steps: Iterable[_Step]) -> list[torch.Generator]:
    """Return the generators of ``steps``, each once."""
    return list({step.generator: None for step in steps if step.generator is not None})


def _merge_generators(steps: list[_Step]) -> None:
    """Replace generators of ``steps`` that have the same state by one of them."""
    of_state: dict[torch.Generator, torch.Generator] = {}
    for generator in _generators(steps):
        same = [other for other in of_state.values() if share_state(generator, other)]
        of_state[generator] = same[0] if same else generator
    steps[:] = [
        replace(step, generator=of_state[step.generator]) if step.generator else step
        for step in steps
    ]
