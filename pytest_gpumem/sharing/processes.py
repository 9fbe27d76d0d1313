"""The identity of a process: its PID and start time, since a PID can be reused."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

import psutil

UNKNOWN_PROCESS = 0
"""The key, in place of a PID, of bytes that the driver assigns to no process."""


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    started: float
    """Start time in seconds, by the system: with the PID it identifies one process for ever."""


def this_process() -> Process:
    """Return the calling process."""
    return Process(os.getpid(), psutil.Process().create_time())


def is_alive(process: Process) -> bool:
    """Return whether it still runs. A zombie does not: its memory has been freed."""
    try:
        found = psutil.Process(process.pid)
        return found.create_time() == process.started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Return whether a running process was started by one of ``ancestors``, directly or not."""
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def name_of(pid: int) -> str:
    """Return a process's readable name: its PID, and its program where the system gives it."""
    try:
        return f"PID {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"PID {pid}"
