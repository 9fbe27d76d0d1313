"""Python's garbage collector, left out where it could only look in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Here, because code under test may replace what the module has.
from gc import disable, enable, isenabled


@contextmanager
def paused() -> Iterator[None]:
    """Let nothing be collected inside, but for who asks for it.

    Reading a large document makes nothing but new objects, and looking through them again and
    again takes half of the time.
    """
    enabled = isenabled()
    disable()
    try:
        yield
    finally:
        if enabled:
            enable()
