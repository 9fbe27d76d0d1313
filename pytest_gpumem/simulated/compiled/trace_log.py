"""torch's structured trace: a log of its compilations, for torch's own tools.

Without this, other listeners get empty lines. pytest listens to all loggers that do not propagate,
and showed hundreds of them with a failure.

Source: torch/_logging/_internal.py (``trace_structured``, ``LazyTraceHandler``), torch 2.11 and
2.13; _pytest/logging.py (``catching_logs``), pytest 9.2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger("torch.__trace")


@contextmanager
def only_if_asked_for() -> Iterator[None]:
    """Write the trace inside only where ``TORCH_TRACE`` asks for it."""
    _LOG.addFilter(_is_asked_for)
    try:
        yield
    finally:
        _LOG.removeFilter(_is_asked_for)


def _is_asked_for(_: logging.LogRecord) -> bool:
    # torch's own is there in any case, and is removed at the first record where it has no folder.
    return any(getattr(each, "root_dir", None) for each in _LOG.handlers)
