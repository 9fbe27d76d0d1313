"""Which process is meant: a number alone may be another's by tomorrow."""

from __future__ import annotations

import os
from collections.abc import Collection
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


def descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Whether a process that runs was started by one of ``ancestors``, or by what they started."""
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def name_of(pid: int) -> str:
    """Return what a person knows a process by: its number, and its program where that is told."""
    try:
        return f"PID {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"PID {pid}"
