"""Values in a CUDA graph: unchanged while it is captured, computed at each replay.

Operators are remembered with the places that they read and write, not with their tensors: memory
is freed as on a GPU, and a replay runs their CPU kernels on what is at those places by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import Layout, layout_of, write_result

P = TypeVar("P", bound=Hashable)
"""The place of a storage: the key by which a device finds its values."""


@dataclass(frozen=True)
class View(Generic[P]):
    """A tensor of captured work, and the place of its storage."""

    layout: Layout
    place: P


@dataclass(frozen=True)
class Step(Generic[P]):
    """A captured call."""

    operator: Operator | None
    """``None`` for a kernel of which only the targets are known."""
    args: Args
    kwargs: Kwargs
    result: Any
    targets: Sequence[View[P]]
    generator: torch.Generator | None
    """One that keeps the state from which this call draws: the program may give its generator
    another."""


class Recorder(ABC, Generic[P]):
    """The operators of one capture, in their order."""

    def __init__(self) -> None:
        self.steps: list[Step[P]] = []

    def add(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Remember a call, without computing it now."""
        if operator.moves_views:
            return
        targets: list[Any] = list(operator.targets(args, kwargs))
        written = [args[at] for at, _ in operator.written if at < len(args)]
        targets += [view for view in written if isinstance(view, View)]
        args, kwargs, result, targets = self.described([args, kwargs, result, targets])
        generator = self._generator_of(kwargs) if operator.random else None
        self.steps.append(Step(operator, args, kwargs, result, targets, generator))

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember a kernel that writes unknown values to ``tensors``."""
        self.steps.append(Step(None, (), {}, None, self.described(list(tensors)), None))

    def described(self, value: Any) -> Any:
        """Return ``value`` with a :class:`View` in place of each GPU tensor, for :meth:`add`."""

        def part(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                is_described = raw.is_on_device(value) and value.layout is torch.strided
                return View(layout_of(value), self._place_of(value)) if is_described else value
            return raw.CPU if isinstance(value, torch.device) else value

        return tree_map(part, value)

    def replay(self, *, computes: bool) -> None:
        """Repeat all calls; unless it ``computes`` them, mark their results as unknown."""
        for step in self.steps:
            if not computes or not self._repeat(step):
                for view in (*step.targets, *_views_in(step.result)):
                    self._forget(view)

    def _repeat(self, step: Step[P]) -> bool:
        """Return whether the results of a call are known now."""
        operator = step.operator
        if operator is None:
            return False
        if operator.uninitialized:
            for view in _views_in(step.result):
                self._mark_uninitialized(view)
            return True

        def real(part: Any) -> Any:
            if not isinstance(part, View):
                return part
            is_read = not operator.shaped_like
            if operator.overwrites and part in step.targets:
                is_read = False
            memory = self._seen(part, is_read=is_read)
            if memory is None:
                raise KeyError
            return memory

        try:
            args, kwargs = tree_map(real, (step.args, step.kwargs))
        except KeyError:  # an argument that is not known
            return False
        computed = self._run(operator, args, kwargs, step.generator)
        if computed is None:
            return False
        for target in step.targets:
            self._mark_known(target)
        # Some write to an argument and return something else: batch norm, rrelu with noise.
        self._write(step.result, computed, {target.place for target in step.targets})
        return True

    def _write(self, result: Any, computed: Any, written: Collection[P]) -> None:
        if isinstance(result, View):
            memory = None
            if result.place not in written:
                memory = self._seen(result, is_read=False)
            if memory is not None:
                keep = self._mark_known if write_result(memory, computed) else self._forget
                keep(result)
        elif isinstance(result, (list, tuple)):
            given = computed if isinstance(computed, (list, tuple)) else [None] * len(result)
            for one, other in zip(result, given, strict=False):
                self._write(one, other, written)

    @abstractmethod
    def _place_of(self, tensor: torch.Tensor) -> P:
        """Return the place of the storage of ``tensor``."""

    @abstractmethod
    def _generator_of(self, kwargs: Kwargs) -> torch.Generator | None:
        """Return a generator with the state that a random operator draws from now."""

    @abstractmethod
    def _seen(self, view: View[P], *, is_read: bool) -> torch.Tensor | None:
        """Return ``view`` as a CPU tensor; ``None`` if it is not there, or unknown and read."""

    @abstractmethod
    def _run(
        self, operator: Operator, args: Args, kwargs: Kwargs, generator: torch.Generator | None
    ) -> Any:
        """Return the result of a call on CPU tensors; ``None`` if the CPU has no kernel."""

    @abstractmethod
    def _mark_uninitialized(self, view: View[P]) -> None:
        """Note that ``view`` is memory with arbitrary values: it may be written to in part."""

    @abstractmethod
    def _mark_known(self, view: View[P]) -> None:
        """Note that ``view`` has been written to."""

    @abstractmethod
    def _forget(self, view: View[P]) -> None:
        """Mark the values of ``view`` as unknown."""


def _views_in(value: Any) -> list[View[Any]]:
    """Return the views in ``value``, itself one or a list or tuple of them."""
    if isinstance(value, View):
        return [value]
    items = value if isinstance(value, (list, tuple)) else ()
    return [found for item in items for found in _views_in(item)]
