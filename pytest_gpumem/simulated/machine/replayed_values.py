"""Values in a CUDA graph: unchanged while it is captured, computed at each replay.

Operators are remembered with the storages that they read and write, not with their tensors: memory
is freed when it would be. Values that a replay writes where a storage has died stay in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import CPU
from pytest_gpumem.simulated.machine.generators import shared_state
from pytest_gpumem.simulated.machine.pool_contents import Place, PoolContents
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import (
    Layout,
    is_written,
    layout_of,
    layouts_in,
    mapped,
    view_of,
)


@dataclass(frozen=True)
class _View(Layout):
    """A tensor of captured work."""

    place: Place


@dataclass(frozen=True)
class _Step:
    operator: Operator | None
    """``None`` for a kernel of which nothing is known but its targets."""
    args: Args
    kwargs: Kwargs
    result: Any
    targets: tuple[_View, ...]

    @property
    def written(self) -> Sequence[_View]:
        """All tensors that change."""
        return *self.targets, *layouts_in(self.result, _View)


class Recording:
    """The operators of one capture, in their order."""

    def __init__(self, values: Values, contents: PoolContents) -> None:
        self._values = values
        self._contents = contents
        self._steps: list[_Step] = []
        self._places: dict[int, Place] = {}

    def add(self, operator: Operator, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Remember a call, without computing it now."""
        if operator.moves_views:
            return
        written = [args[at] for at, _ in operator.written if at < len(args)]
        targets = [self.described(tensor) for tensor in operator.targets(args, kwargs)]
        targets += [view for view in written if isinstance(view, _View)]
        self._steps.append(
            _Step(
                operator,
                self.described(args),
                self.described(kwargs),
                self.described(result),
                tuple(targets),
            )
        )

    def wrote(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember a kernel that writes unknown values to ``tensors``."""
        targets = tuple(self.described(tensor) for tensor in tensors)
        self._steps.append(_Step(None, (), {}, None, targets))

    def replay(self) -> None:
        """Repeat all calls; unless all values are computed, mark their results as unknown."""
        if self._values.everything:
            run = _Replay(self._values, self._contents)
            for step in self._steps:
                run.do(step)
            return
        for step in self._steps:
            for view in step.written:
                if view.place.lives:
                    self._values.forget(view.place.key)

    def described(self, value: Any) -> Any:
        """Return ``value`` with descriptions in the place of its GPU tensors, for :meth:`add`."""
        return mapped(value, self._part)

    def _part(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not raw.is_meta(value) or value.layout is not torch.strided:
                return value
            return _View(*layout_of(value), self._place(value))
        if isinstance(value, torch.Generator):
            return shared_state(value)  # as it is now: another may be set before the replay
        return CPU if isinstance(value, torch.device) else value

    def _place(self, tensor: torch.Tensor) -> Place:
        key = storage_key(tensor)
        place = self._places.get(key)
        if place is None or not place.lives:
            place = self._places[key] = Place(tensor, self._contents)
            self._contents.add(place)
        return place


class _Replay:
    def __init__(self, values: Values, contents: PoolContents) -> None:
        self._values = values
        self._contents = contents
        self._blank: set[Place] = set()
        """Memory made for a write: its earlier contents do not matter."""

    def do(self, step: _Step) -> None:
        operator = step.operator
        if operator is None:
            for target in step.targets:
                self._contents.forget(target.place)
            return
        if operator.blank:
            self._blank.update(view.place for view in layouts_in(step.result, _View))
            return
        for target in step.targets:
            self._base(target, make=operator.overwrites or target.place in self._blank)
            self._contents.overwritten(target.place)
        try:
            args, kwargs = self._real(step.args, operator), self._real(step.kwargs, operator)
        except KeyError:  # an argument that is not known
            for view in step.written:
                self._contents.forget(view.place)
            return
        computed = self._values.run(operator, args, kwargs)
        # Some write to an argument and return something else: batch norm, rrelu with noise.
        self._write(step.result, computed, {target.place for target in step.targets})

    def _real(self, value: Any, operator: Operator) -> Any:
        def real(part: Any) -> Any:
            if not isinstance(part, _View):
                return part
            base = self._base(part, make=operator.shaped_like)
            if base is None:
                raise KeyError
            return view_of(base, part)

        return mapped(value, real)

    def _write(self, result: Any, computed: Any, written: set[Place]) -> None:
        if isinstance(result, _View):
            if result.place in written:
                return
            base = self._base(result, make=True)
            self._contents.overwritten(result.place)
            assert base is not None
            if not is_written(view_of(base, result), computed):
                self._contents.forget(result.place)
        elif isinstance(result, (list, tuple)):
            given = computed if isinstance(computed, (list, tuple)) else [None] * len(result)
            for one, other in zip(result, given, strict=False):
                self._write(one, other, written)

    def _base(self, view: _View, *, make: bool) -> torch.Tensor | None:
        base = self._contents.at(view.place)
        if base is None and make:
            size = view.place.nbytes // view.dtype.itemsize
            base = torch.empty(size, dtype=view.dtype, device=CPU)
            self._contents.put(view.place, base)
        return base
