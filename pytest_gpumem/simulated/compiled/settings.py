"""Inductor's settings for compiling, torch's counts for the process, and code not followed.

Compiled code that cannot be followed runs eagerly with a note, or is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.compiled_notes import (
    OF_COMPILED_CODE,
    RUNS_EAGERLY,
    ran_eagerly,
)
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

TUNING = """
    max_autotune max_autotune_gemm max_autotune_pointwise coordinate_descent_tuning
    triton.autotune_at_compile_time
""".split()
"""Settings with which Inductor chooses kernels by their speed."""

HELPERS = "get_compile_threads"
"""Inductor's function for how many processes and threads compile kernels (async_compile.py)."""


def no_helpers() -> int:
    """Return 1: no kernel is compiled, and threads that help would never become idle."""
    return 1


_ATTENTION = (
    "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled".split()
)
"""Settings of ``torch.backends.cuda`` that allow kernels of attention."""


@contextmanager
def apart_by_attention() -> Iterator[None]:
    """Make the allowed kernels of attention a part of the key of torch's graph cache, inside.

    The kernel is chosen while a graph is traced, but is no part of the key under which torch keeps
    the graph. So a test could get the graph of an earlier test with another choice.

    Source: torch/_inductor/codecache.py (``FxGraphHashDetails``), torch 2.11 to 2.15.
    """
    compiler: Any = torch.compiler.config
    flags = [getattr(torch.backends.cuda, name)() for name in _ATTENTION]
    chosen = "".join(str(int(flag)) for flag in flags)
    order = torch._C._get_sdp_priority_order()
    with compiler.patch(cache_key_tag=f"{compiler.cache_key_tag}{chosen}{order}"):
        yield


_TREES = "torch._inductor.cudagraph_trees"


class MarkedSteps:
    """The steps that one machine's code has marked with ``cudagraph_mark_step_begin()``.

    torch counts them for the process. After the first, results of CUDA graphs are overwritten only
    when a step begins, and no longer by each call. So the count belongs to the machine that is
    active, and ends with the test. Source: torch/_inductor/cudagraph_trees.py (MarkStepBox,
    get_curr_generation), torch 2.6 to 2.13.
    """

    def __init__(self) -> None:
        self._count = 0
        self._are_counted = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Show torch only these steps for the duration of the context."""
        others = _exchanged(self._count)
        self._are_counted = True
        try:
            yield
        finally:
            self._are_counted = False
            self._count = _exchanged(others)

    def forget(self) -> None:
        """Reset the count of marked steps."""
        self._count = 0
        if self._are_counted:
            _exchanged(0)


def _exchanged(count: int) -> int:
    """Set torch's count to ``count``; return the old one."""
    trees = sys.modules.get(_TREES)
    if trees is None:
        return 0
    before: int = trees.MarkStepBox.mark_step_counter
    trees.MarkStepBox.mark_step_counter = count
    return before


class launched:  # noqa: N801  # one for the process, as a simulation replaces names of all of it
    """The receiver of launches; wrappers outlive the simulations that they were made in."""

    wrote: Callable[..., None] | None = None
    """Called with the tensors that a kernel wrote to; ``None`` while nothing is simulated."""


_LOG = logging.getLogger("torch.__trace")


@contextmanager
def traced_only_if_asked_for() -> Iterator[None]:
    """Write torch's structured trace inside only where ``TORCH_TRACE`` asks for it.

    pytest listens to all loggers that do not propagate, and showed hundreds of empty lines of it
    with a failure. Source: torch/_logging/_internal.py (``trace_structured``,
    ``LazyTraceHandler``), torch 2.11 and 2.13; _pytest/logging.py (``catching_logs``), pytest 9.2.
    """
    _LOG.addFilter(_is_asked_for)
    try:
        yield
    finally:
        _LOG.removeFilter(_is_asked_for)


def _is_asked_for(_: logging.LogRecord) -> bool:
    # torch's handler is always there, and goes at the first record if it has no folder.
    return any(getattr(each, "root_dir", None) for each in _LOG.handlers)


class CompiledCodeError(RuntimeError):
    """An error for compiled code that cannot be followed, if all of it must be."""


def note_at_line(machine: SimulatedMachine, predicate: str) -> None:
    """Note how the compiled code that the user's line calls runs."""
    sentence = f"{OF_COMPILED_CODE} {user_line()} {predicate}"
    machine.note(sentence, always=ran_eagerly(sentence))


def tell_of_compiled_code(notes: Iterable[str]) -> bool:
    """Return whether ``notes`` are of a run whose compiled code was not followed."""
    return any(note.startswith(OF_COMPILED_CODE) for note in notes)


def not_followed(machine: SimulatedMachine, error: Exception, *, refuses: bool) -> None:
    """Note that compiled code runs eagerly because of ``error``.

    Raises :class:`CompiledCodeError` instead if ``refuses``.
    """
    what = "could not be followed on a simulated GPU"
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    if refuses:
        raise CompiledCodeError(f"{OF_COMPILED_CODE} {user_line()} {what}: {first}") from error
    note_at_line(
        machine,
        f"{what}, so it {RUNS_EAGERLY}; the number is eager code's, and compiled code may allocate "
        f"less: {first}",
    )


_OWN: tuple[type, ...] = torch.cuda.streams.Stream, torch.cuda.streams.Event
"""torch's own classes, whose names may be replaced."""


@contextmanager
def streams_refused() -> Iterator[list[str]]:
    """Refuse streams and events that compiled code makes inside, which are not followed.

    Dynamo makes them while it traces, of torch's own classes, which need a driver, and keeps them
    for the code that it writes. The value has the reasons, as torch wraps errors by release.
    Source: torch/_dynamo/variables/user_defined.py and streams.py, torch 2.11 to 2.15.
    """
    refusals: list[str] = []

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        refusals.append(f"it makes a torch.cuda.{cls.__name__}")
        raise CompiledCodeError(refusals[-1])

    with ExitStack() as inside:
        for owner in _OWN:
            inside.enter_context(mock.patch.object(owner, "__new__", refuse))
        yield refusals
