"""Where in the user's code something happened."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


@cache
def _is_internal(filename: str) -> bool:
    torch_folder = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
    return filename.startswith((torch_folder, _OWN, "<")) or f"{os.sep}contextlib.py" in filename


def user_line() -> str:
    """``path:line`` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_internal(filename):
            try:
                shown = os.path.relpath(filename)
            except ValueError:  # another drive on Windows
                shown = filename
            return f"{filename if shown.startswith('..') else shown}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "<unknown>"
