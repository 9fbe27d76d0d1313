"""Where in the code something happened."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep

MOST_FRAMES = 48
"""Frames kept per event, innermost first."""


class Stack:
    """The Python frames of one event; lines are looked up only when somebody reads them."""

    __slots__ = ("_entries", "_frames")

    def __init__(self, entries: list[tuple[CodeType, int]]) -> None:
        self._entries = entries
        self._frames: list[dict[str, Any]] | None = None

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Innermost first, as torch's snapshots show them: filename, line and name."""
        if self._frames is None:
            self._frames = [
                {"filename": code.co_filename, "line": _line(code, offset), "name": code.co_name}
                for code, offset in self._entries
            ]
        return self._frames


def current_stack() -> Stack:
    """The frames that lead here, without those of this package in front."""
    entries: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    following: Any = frame
    while following is not None and len(entries) < MOST_FRAMES:
        entries.append((following.f_code, following.f_lasti))
        following = following.f_back
    return Stack(entries)


def user_line() -> str:
    """``path:line`` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    filename = frame.f_code.co_filename
    try:
        shown = os.path.relpath(filename)
    except ValueError:  # another drive on Windows
        shown = filename
    return f"{filename if shown.startswith('..') else shown}:{frame.f_lineno}"


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


@cache
def _is_own(filename: str) -> bool:
    return filename.startswith(_OWN)


@cache
def _is_internal(filename: str) -> bool:
    torch_folder = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
    return filename.startswith((torch_folder, _OWN, "<")) or Path(filename).name == "contextlib.py"
