"""One writer at a time: locks of baseline files, and the folder where locks and drafts live.

The locks stand in ``<root>/.gpumem-locks``, which says itself that git is to ignore it and which
the last writer removes. A lock is the kernel's (``flock``, which Linux passes on to an NFS server):
it ends with its process, however that ends, so what a killed writer leaves behind is no lock but
files that the next writer clears away. On a file system whose ``flock`` does not work, as that of
some NFS and FUSE servers, the lock is the file itself, with process and host in it; one of a killed
writer is found out on its own host, and named on another.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.echo import printable

if TYPE_CHECKING:
    from filelock import BaseFileLock

FOLDER = ".gpumem-locks"
_IGNORED = ".gitignore"
PATIENCE = 60.0
"""Seconds; a write takes a second or two."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EIO})
"""What ``flock`` says where it does not work: not there, no lock daemon (NFS), not supported, or
what FUSE makes of an answer that it does not know. filelock knows the first alone."""

_EVERYONE = 0o666
"""Whoever may write in the folder may lock there: colleagues share it."""


class LockError(Exception):
    """A lock that was not to be had; the message says who holds it and what to do."""


class Locks:
    """The locks of the files under one baselines folder."""

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self._folder = root / FOLDER
        self._patience = patience
        """Seconds that are left to wait, for all files together."""
        self._by_files = False
        """Whether locks are files, because the kernel has none there."""

    @contextmanager
    def holding(self, path: Path) -> Iterator[Path]:
        """Hold the lock of the file ``path``; yields where the draft of its new content belongs.

        Raises :class:`LockError` where another process keeps the lock, ``OSError`` where the folder
        cannot be written.
        """
        name = self._name(path)
        lock = self._acquired(name)
        try:
            self._settle(name)
            yield self._folder / f"{name}.tmp"
        finally:
            self._clear(name)
            lock.release()
            self._sweep()

    def _name(self, path: Path) -> str:
        relative = path.relative_to(self._root).as_posix()
        return sha256(relative.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def _acquired(self, name: str) -> BaseFileLock:
        from filelock import Timeout

        started = time.monotonic()
        # Each of many files gets its second, though others have used the time up.
        deadline = started + max(self._patience, 1.0)
        while True:
            self._make_folder()
            try:
                self._by_files = self._by_files or not _can_flock(self._folder / _IGNORED)
                lock = self._lock(name)
                _acquire(lock, deadline - time.monotonic())
                break
            except FileNotFoundError:  # the last writer took the folder away just now
                if time.monotonic() > deadline:
                    raise
            except Timeout:
                raise LockError(self._refusal(name, time.monotonic() - started)) from None
            finally:
                self._patience = min(self._patience, deadline - time.monotonic())
        return lock

    def _lock(self, name: str) -> BaseFileLock:
        from filelock import FileLock, SoftFileLock

        kind = SoftFileLock if self._by_files else FileLock
        return kind(self._folder / f"{name}.lock", mode=_EVERYONE)

    def _make_folder(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._folder.mkdir()
            with suppress(OSError):
                self._folder.chmod(self._root.stat().st_mode & 0o7777)
        self._ignore()

    def _ignore(self) -> None:
        """Keep the folder out of version control."""
        present = suppress(FileExistsError, FileNotFoundError)
        with present, (self._folder / _IGNORED).open("xb") as file:
            file.write(b"*\n")

    def _settle(self, name: str) -> None:
        """Say who holds the lock, and clear away what a killed writer left."""
        self._ignore()
        (self._folder / f"{name}.tmp").unlink(missing_ok=True)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with suppress(OSError):
            (self._folder / f"{name}.holder").write_text(holder, encoding="utf-8")

    def _clear(self, name: str) -> None:
        """Take the lock's files away while it is held: who waits for it finds that it is gone."""
        with suppress(OSError):
            for kind in ("tmp", "holder", "lock"):
                (self._folder / f"{name}.{kind}").unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Clear away what killed writers left of other files, and the folder if that was all."""
        from filelock import Timeout

        with suppress(OSError):
            for path in self._folder.glob("*.lock"):
                lock = self._lock(path.stem)
                with suppress(OSError, Timeout):
                    _acquire(lock, 0.0)
                    self._clear(path.stem)
                    lock.release()
            if [path.name for path in self._folder.iterdir()] == [_IGNORED]:
                (self._folder / _IGNORED).unlink()
                try:
                    self._folder.rmdir()
                except OSError:  # a writer came in between
                    self._ignore()

    def _refusal(self, name: str, seconds: float) -> str:
        return (
            f"{self._holder(name)} has been writing it for {seconds:.0f} s; run again when that "
            f"has ended, or delete {self._folder} where no such process exists any more"
        )

    def _holder(self, name: str) -> str:
        with suppress(OSError, ValueError):
            return printable((self._folder / f"{name}.holder").read_text(encoding="utf-8"), 100)
        with suppress(OSError, ValueError):  # process and host, where the lock is a file
            process, host = (self._folder / f"{name}.lock").read_text().split()[:2]
            return f"process {printable(process, 20)} on {printable(host, 80)}"
        return "another process"


def _can_flock(path: Path) -> bool:
    """Return whether the file system of ``path`` has locks; raises ``OSError`` for a missing
    file."""
    try:
        import fcntl
    except ImportError:  # Windows, whose locks are others
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _NO_FLOCK
    return True


def _acquire(lock: BaseFileLock, seconds: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file system without flock
        lock.acquire(timeout=max(seconds, 0.0))
