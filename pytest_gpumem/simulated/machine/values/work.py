"""How much computing a run asks for: estimated of one on shapes, bounded of one with values.

Products, convolutions and attention are counted, by torch's own formulas; they are most of what a
network computes. So an estimate is low where a run is made of something else: what then takes too
long is stopped while it runs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import WorkLimitError

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_BY_LENGTHS = frozenset(
    {
        "aten::_efficient_attention_backward",
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_backward",
        "aten::_flash_attention_forward",
    }
)
"""Operators whose formulas read the values of their arguments."""

_PROBES = {torch.float32: 512, torch.float64: 512}
_PROBE = 256
"""Rows of the product that measures the host's speed: other types may have no fast kernel."""
_TRIES = 3

SHOWN_EVERY = 0.5
"""Seconds between two reports of progress."""

_now = time.perf_counter


class Work:
    """What a run has asked for, in operations of floating point, and what it may ask for."""

    def __init__(self) -> None:
        self._counted: defaultdict[torch.dtype, int] = defaultdict(int)
        self._known: dict[Any, int] = {}
        self._limit: float | None = None
        self._spent = 0.0
        self._shown = 0.0
        self._show: Callable[[float], None] | None = None

    def begin(self) -> None:
        """Begin anew, without a limit."""
        self._counted.clear()
        self._limit = self._show = None

    def bound(self, seconds: float, show: Callable[[float], None] | None = None) -> None:
        """Let values be computed for so many seconds; ``show`` is told of the time spent."""
        self._limit, self._show = seconds, show
        self._spent = self._shown = 0.0

    @property
    def seconds(self) -> float:
        """How long the CPU of this machine takes for what was counted, at the least."""
        return sum(count / speed(dtype) for dtype, count in self._counted.items())

    def counting(self, func: Any, handler: Handler) -> Handler:
        """Let ``handler``, which runs ``func``, count; as it is for operators without a formula."""
        formula = _formula(func)
        if formula is None:
            return handler
        known, counted = self._known, self._counted

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = handler(args, kwargs)
            key = func, getattr(result, "shape", None), *map(_shape, args[:4])
            count = known.get(key)
            if count is None:
                count = known[key] = formula(args, kwargs, result)
            counted[args[1].dtype] += count
            return result

        return handle

    def expect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Stop before the values of ``result``, of ``func``, where they take more than is left."""
        if self._limit is None:
            return
        formula = _formula(func)
        if formula is not None:
            seconds = formula(args, kwargs, result) / speed(args[1].dtype)
            if self._spent + seconds > self._limit:
                self._stop()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute values inside, which counts as work; raises :class:`WorkLimitError`."""
        if self._limit is None:
            yield
            return
        if self._spent > self._limit:
            self._stop()
        start = _now()
        try:
            yield
        finally:
            self._spent += _now() - start
        if self._show is not None and self._spent - self._shown > SHOWN_EVERY:
            self._shown = self._spent
            self._show(self._spent)

    def _stop(self) -> None:
        limit, self._limit = self._limit, None  # what tears the test down runs to its end
        raise WorkLimitError(
            f"computing values on the CPU takes longer than {limit:g} s, at {user_line()}"
        )


def _formula(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], int] | None:
    found = flop_registry.get(getattr(func, "overloadpacket", None))
    if found is None or func._schema.name in _BY_LENGTHS or "out" in func._schema.overload_name:
        return None

    def count(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        if "dtype" in func._schema.overload_name:
            # Formulas take the result's type, an argument of these, for its shape.
            args = tuple(value for value in args if isinstance(value, torch.Tensor))
        return int(found(*args, **kwargs, out_val=result))

    return count


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else None


@cache
def speed(dtype: torch.dtype) -> float:
    """Operations of floating point that the CPU does in a second, in products of ``dtype``.

    Measured once in a process, in a few milliseconds.
    """
    size = _PROBES.get(dtype, _PROBE)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        matrix = torch.ones((size, size), device="cpu").to(dtype)
        times = []
        for _ in range(_TRIES):
            start = _now()
            try:
                torch.mm(matrix, matrix)
            except RuntimeError:  # no kernel: it is computed in float32
                return speed(torch.float32)
            times.append(_now() - start)
    return 2 * size**3 / max(min(times), 1e-9)
