"""Paths in a readable form."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path


def relative(path: str | Path, folder: str | Path) -> str:
    """Return ``path`` relative to ``folder``, or unchanged on another drive of Windows."""
    try:
        return os.path.relpath(path, folder)
    except ValueError:
        return str(path)


def from_here(path: Path) -> Path:
    """Return ``path`` relative to the current folder if it lies below it, else unchanged."""
    with suppress(ValueError, OSError):  # OSError: the current folder is gone
        return path.relative_to(Path.cwd())
    return path


def git(folder: Path, *arguments: str) -> bytes:
    """Return git's output in ``folder``; raises ``ValueError`` with its message."""
    # If a git hook runs this, these variables name the hook's repository.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    try:
        ran = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            env={**environment, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise ValueError("git is not installed, and what was committed is read by it") from None
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise ValueError(f"git: {lines[0].removeprefix('fatal: ')}")
    return ran.stdout


def toplevel(folder: Path) -> Path:
    """Return the root of the work tree that ``folder`` is in; raises ``ValueError`` outside."""
    return Path(git(folder, "rev-parse", "--show-toplevel").decode().removesuffix("\n"))


_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
