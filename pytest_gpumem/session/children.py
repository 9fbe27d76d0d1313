"""Processes that a test's body forks with ``os.fork()`` and that leave the body."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def end_of_children(nodeid: str) -> Iterator[None]:
    """End a process that was forked inside and leaves: it would go on as a second pytest.

    Its exit code is that of a script that ends here. A sentence on the test ``nodeid`` goes to its
    standard error, below the place of an exception.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _end(sys.exc_info()[1], nodeid)


def _end(error: BaseException | None, nodeid: str) -> None:
    code = 0 if error is None else 1
    shown = ""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        shown = "".join(traceback.format_exception(error, limit=-1))
    sentence = f"{shown}gpumem: process {os.getpid()}, forked by {nodeid}, ends with the body\n"
    os.write(2, sentence.encode(errors="backslashreplace"))
    os._exit(code & 0xFF)
