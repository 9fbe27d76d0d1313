"""Which process is meant: a number alone may be another's by tomorrow."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    started: float
    """Seconds, as the system counts them: with the number it names one process for ever."""


def this_process() -> Process:
    """Return the process that asks."""
    return Process(os.getpid(), psutil.Process().create_time())


def is_alive(process: Process) -> bool:
    """Whether it still runs. A zombie does not: its memory has been given back."""
    try:
        found = psutil.Process(process.pid)
        return found.create_time() == process.started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
