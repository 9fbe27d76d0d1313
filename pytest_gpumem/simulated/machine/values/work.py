"""Computing time of a run: estimated for a run on shapes, limited for a run with values.

Products, convolutions and attention are counted, by torch's own formulas; they are most of a
network's computing. So an estimate is low where a run is made of something else: a run that then
takes too long is stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs, is_out
from pytest_gpumem.values.errors import WorkLimitError

_WITH_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        "_convolution _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward _scaled_mm _slow_conv2d_forward addmm "
        "baddbmm bmm convolution convolution_backward cudnn_convolution mm"
    ).split()
)
"""Operators that torch has a formula for (torch/utils/flop_counter.py, 2.6 to 2.15), but for those
whose formulas read the values of their arguments, and for ``convolution_overrideable``, a part of a
convolution. Which of them have one in the present release is looked up late: torch imports Triton
along with them, where it is installed."""

_PROBES = {torch.float32: 512, torch.float64: 512, torch.float16: 256, torch.bfloat16: 256}
"""Rows of the product that measures the host's speed: halves may have no fast kernel."""
_TRIES = 3

SHOWN_EVERY = 0.5
"""Seconds between two reports of progress."""

_aten = torch.ops.aten
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default

_FINE = 1e-4
"""Seconds: a coarser clock cannot time a probe (that of a thread's time on Windows)."""


_is_fine = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution <= _FINE
_now = time.thread_time if _is_fine else time.perf_counter
"""The time that this thread has computed, which other processes do not change."""


_Call = tuple[Any, Any, Any, Any]
"""Operator, arguments, named arguments and result, with shapes in the place of tensors."""


class Work:
    """Floating-point operations that a run has needed, and their limit."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}
        """Calls by operator and shapes; nothing else of them is kept."""
        self._times: Counter[Any] = Counter()
        self._limit: float | None = None
        self._spent = 0.0
        self._shown = 0.0
        self._show: Callable[[float], None] | None = None
        self.check: Callable[[], None] = lambda: None
        """Called before operators that may take long; an exception that it raises ends the run."""

    def begin(self) -> None:
        """Reset the counts, without a limit."""
        self._calls.clear()
        self._times.clear()
        self._limit = self._show = None

    def bound(self, seconds: float, show: Callable[[float], None] | None = None) -> None:
        """Limit the computing of values to ``seconds``; ``show`` is called with the time spent."""
        self._limit, self._show = seconds, show
        self._spent = self._shown = 0.0

    @property
    def seconds(self) -> float:
        """The least time that this machine's CPU takes for the counted operations."""
        counted: Counter[torch.dtype] = Counter()
        for key, call in self._calls.items():
            counted[key[1]] += self._times[key] * _operations(*call)
        return sum(count / speed(dtype) for dtype, count in counted.items())

    def counting(self, func: Any, handler: Handler) -> Handler:
        """Wrap ``handler`` of ``func`` to count it, where torch has a formula for ``func``."""
        if not _has_formula(func):
            return handler
        known, times = self._calls, self._times

        def handle(args: Args, kwargs: Kwargs) -> Any:
            self.check()
            result = handler(args, kwargs)
            try:
                shapes = [getattr(value, "shape", None) for value in (result, *args[:4])]
            except RuntimeError:  # a nested tensor has none
                return result
            key = func, args[1].dtype, *shapes
            if key not in known:
                given = tree_map_only(
                    torch.Tensor, lambda tensor: tensor.shape, (args, kwargs, result)
                )
                known[key] = func, *given
            times[key] += 1
            return result

        return handle

    def expect(self, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Raise before computing ``result`` of ``func``, if that exceeds the remaining time."""
        if self._limit is not None and _has_formula(func):
            seconds = _operations(func, args, kwargs, result) / speed(args[1].dtype)
            if self._spent + seconds > self._limit:
                self._stop()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute values inside, which counts as work; raises :class:`WorkLimitError`."""
        self.check()
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
        limit, self._limit = self._limit, None  # the teardown of the test runs to its end
        raise WorkLimitError(
            f"computing values on the CPU takes longer than {limit:g} s, at {user_line()}"
        )


def _has_formula(func: Any) -> bool:
    schema = getattr(func, "_schema", None)  # a composite's is a Python function
    return schema is not None and schema.name in _WITH_FORMULA and not is_out(schema)


def _operations(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    from torch.utils.flop_counter import flop_registry  # imports Triton where it is installed

    if func is _CONVOLUTION_BACKWARD:
        # Torch's formula computes the weight's gradient as if there were one group, whatever the
        # number of groups (conv_backward_flop in torch/utils/flop_counter.py, 2.6 to 2.15).
        gradient, *operands, asked = args
        forward = flop_registry[_aten.convolution]
        shapes = operands[0], operands[1], None, *operands[3:]
        once: int = forward(*shapes, out_val=gradient)
        return once * int(sum(asked[:2]))
    found = flop_registry.get(func.overloadpacket)
    if found is None:
        return 0
    if "dtype" in func._schema.overload_name:
        # Formulas take the result's type, an argument of these, for its shape.
        args = tuple(value for value in args if isinstance(value, (torch.Tensor, torch.Size)))
    return int(found(*args, **kwargs, out_val=result))


@cache
def speed(dtype: torch.dtype) -> float:
    """Return the CPU's floating-point operations per second, in products of ``dtype``.

    Measured once in a process, in some milliseconds: on one thread, in its own time, and taken for
    as many threads as torch has. Other work on the machine does not change it.
    """
    if dtype not in _PROBES:  # as products of 8 bits are computed: in float32
        return speed(torch.float32)
    size = _PROBES[dtype]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            matrix = torch.ones((size, size), device="cpu").to(dtype)
            times = []
            for _ in range(_TRIES):
                start = _now()
                torch.mm(matrix, matrix)
                times.append(_now() - start)
    except RuntimeError:  # no kernel: it is computed in float32
        return speed(torch.float32)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * size**3 / max(min(times), 1e-9)
