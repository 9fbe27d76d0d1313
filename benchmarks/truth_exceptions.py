"""Cases in which the two devices cannot be compared, and why.

Three reasons only: values that decide how much is taken, workspaces that a library chooses, and
times. Everything else is a difference.
"""

from __future__ import annotations

VALUES = "values decide what is taken"
LIBRARY = "a library chooses its workspace"

EXCEPTIONS: dict[str, str] = {}
"""Reasons by the names of groups."""


def exception_of(case: str, outcome: str) -> str | None:
    """Return why ``case`` is not comparable."""
    del outcome
    return EXCEPTIONS.get("/".join(case.split("/")[:2]))
