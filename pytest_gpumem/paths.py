"""Paths in a readable form."""

from __future__ import annotations

import os
from pathlib import Path


def relative(path: str | Path, folder: str | Path) -> str:
    """Return ``path`` relative to ``folder``, or unchanged where that is impossible.

    Under Windows it is so from one drive to another.
    """
    try:
        return os.path.relpath(path, folder)
    except ValueError:
        return str(path)
