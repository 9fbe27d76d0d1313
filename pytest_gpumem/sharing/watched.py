"""The state of pytest runs for ``gpumem gpus --watch``: the running test, and the last test's peak.

A run writes it only while a watcher exists, for which it checks a folder once per test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pytest_gpumem.sharing.database import Process, default_folder, is_alive, this_process
from pytest_gpumem.values.serialization import Plain

WATCHERS = "watchers"
RUNS = "watched"


@dataclass(frozen=True)
class WatchedProcess(Plain):
    """A process that runs tests; times as ``time.time()`` gives them, sizes in bytes."""

    process: Process
    folder: str
    """pytest's rootdir."""
    worker: str
    """Name of the pytest-xdist worker, else empty."""
    device: str
    """Device name: ``simulated T4``, ``NVIDIA H100``."""
    finished: int = 0
    """Number of tests measured so far."""
    test: str | None = None
    """The running test."""
    since: float = 0.0
    last: str | None = None
    """The test that ended last."""
    last_peak: int | None = None
    """Its peak allocated bytes, ``None`` where it was not measured to its end."""


def is_watched(folder: Path) -> bool:
    """Return whether ``gpumem gpus --watch`` shows the runs that use ``folder``."""
    try:
        return any((folder / WATCHERS).iterdir())
    except OSError:
        return False


def show(folder: Path, run: WatchedProcess) -> None:
    """Write ``run`` for watchers; a failure to write is ignored."""
    with suppress(OSError):
        path = folder / RUNS / f"{run.process.pid}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        run.to_file(draft)
        draft.replace(path)


def hide(folder: Path) -> None:
    """Remove this process's run."""
    with suppress(OSError):
        (folder / RUNS / f"{os.getpid()}.json").unlink(missing_ok=True)


def runs(folder: Path) -> list[WatchedProcess]:
    """Return the runs to show, those of dead processes left out and removed."""
    found = []
    for path in sorted((folder / RUNS).glob("*.json")):
        try:
            run = WatchedProcess.from_file(path)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # removed by now, or another file
        if is_alive(run.process):
            found.append(run)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return found


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Announce a watcher to the runs for the duration of the context."""
    own = folder / WATCHERS / str(os.getpid())
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in own.parent.iterdir():  # files of a killed watcher
        if path.name.isdecimal() and not psutil.pid_exists(int(path.name)):
            path.unlink(missing_ok=True)
    own.touch()
    try:
        yield
    finally:
        own.unlink(missing_ok=True)


class Watched:
    """The published state of this process."""

    def __init__(self, rootdir: str, worker: str) -> None:
        self._folder = default_folder()
        self._run = WatchedProcess(this_process(), rootdir, worker, device="")

    def begins(self, test: str, device: str) -> None:
        """Publish that a measured test begins."""
        self._publish(replace(self._run, device=device, test=test, since=time.time()))

    def ended(self, test: str, peak: int | None) -> None:
        """Publish that the test is over."""
        finished = self._run.finished + 1
        self._publish(replace(self._run, finished=finished, test=None, last=test, last_peak=peak))

    def close(self) -> None:
        """Remove the published state."""
        hide(self._folder)

    def _publish(self, run: WatchedProcess) -> None:
        self._run = run
        if is_watched(self._folder):
            show(self._folder, run)
