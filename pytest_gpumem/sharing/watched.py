"""What ``gpumem gpus --watch`` sees of runs of pytest: each one's test, and what the last took.

A run says so only while somebody watches, which costs it one look at a folder for each test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_gpumem.sharing.processes import Process, is_alive

WATCHERS = "watchers"
RUNS = "watched"


@dataclass(frozen=True)
class Run:
    """One process that runs tests; times as ``time.time()`` gives them, sizes in bytes."""

    process: Process
    folder: str
    """pytest's rootdir."""
    worker: str
    """Of pytest-xdist, else empty."""
    device: str
    """``simulated T4``, ``NVIDIA H100``."""
    finished: int = 0
    """Measured tests so far."""
    test: str | None = None
    """That which runs now."""
    since: float = 0.0
    last: str | None = None
    """That which ended last."""
    last_peak: int | None = None
    """What that allocated, ``None`` where it was not measured to its end."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Rebuild what :func:`show` wrote."""
        return cls(**{**data, "process": Process(*data["process"])})


def is_watched(folder: Path) -> bool:
    """Whether somebody watches the runs that meet in ``folder``."""
    try:
        return any((folder / WATCHERS).iterdir())
    except OSError:
        return False


def show(folder: Path, run: Run) -> None:
    """Let watchers see ``run``; where that cannot be written they do not."""
    with suppress(OSError):
        path = folder / RUNS / f"{run.process.pid}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(run)))
        draft.replace(path)


def hide(folder: Path) -> None:
    """Take this process's run out of sight."""
    with suppress(OSError):
        (folder / RUNS / f"{os.getpid()}.json").unlink(missing_ok=True)


def runs(folder: Path) -> list[Run]:
    """Return the runs that are to be seen, those of dead processes left out and removed."""
    found = []
    for path in sorted((folder / RUNS).glob("*.json")):
        try:
            run = Run.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # gone meanwhile, or not ours
        if is_alive(run.process):
            found.append(run)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return found


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Let runs say what they do while this goes on."""
    mine = folder / WATCHERS / str(os.getpid())
    mine.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in mine.parent.iterdir():  # of one that was killed
        if path.name.isdecimal() and not psutil.pid_exists(int(path.name)):
            path.unlink(missing_ok=True)
    mine.touch()
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)
