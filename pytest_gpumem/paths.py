"""Paths as a person reads them."""

from __future__ import annotations

import os
from pathlib import Path


def relative(path: str | Path, folder: str | Path) -> str:
    """Return ``path`` as it is called from ``folder``; whole where no such name exists.

    Under Windows there is none from one drive to another.
    """
    try:
        return os.path.relpath(path, folder)
    except ValueError:
        return str(path)
