"""The names of a script's phases, without torch."""

from __future__ import annotations

LOAD = "load"
"""The phase before a script's first forward."""

ITERATION = "iteration"


def numbered(part: str, iteration: int) -> str:
    """Return the name of a ``part`` of an iteration, or of a whole one."""
    return f"{part}_{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the iteration that the phase ``name`` belongs to, ``None`` for none."""
    part, _, number = name.rpartition("_")
    return int(number) if part and number.isdecimal() else None
