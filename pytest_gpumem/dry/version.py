"""The release of torch in a folder and of the CUDA that it is built for; imports little."""

from __future__ import annotations

import re
from pathlib import Path


def release_of(folder: Path) -> str:
    """Return the release of the torch in ``folder``, as ``2.15.0+cu132``."""
    return _found(r"__version__ = '([^']+)'", folder) or "unknown"


def cuda_of(folder: Path) -> str | None:
    """Return the CUDA release of the torch in ``folder``, ``None`` where it is no CUDA build."""
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        return None
    return _found(r"^cuda\b[^=]*= '([\d.]+)'", folder)


def _found(pattern: str, folder: Path) -> str | None:
    version = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(pattern, version, re.MULTILINE)
    return None if match is None else match[1]
