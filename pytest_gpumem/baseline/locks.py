"""Locks for one writer at a time: of baseline files, with a folder of locks and drafts.

The locks are in ``<root>/.gpumem-locks``, which contains its own .gitignore and which the last
writer removes. A lock is the kernel's (``flock``, which Linux passes on to an NFS server): it ends
with its process in any case, so a killed writer leaves no lock but files that the next writer
removes. On a file system whose ``flock`` does not work, as that of some NFS and FUSE servers, the
lock is the file itself, with process and host in it; that of a killed writer is detected on its own
host, and named on another.
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

from pytest_gpumem.quoting import printable

if TYPE_CHECKING:
    from filelock import BaseFileLock

FOLDER = ".gpumem-locks"
_IGNORED = ".gitignore"
PATIENCE = 60.0
"""Seconds to wait; a write takes a second or two."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EIO})
"""Errors of ``flock`` where it does not work: not implemented, no lock daemon (NFS), not supported,
or FUSE's translation of an unknown answer. filelock handles only the first."""

_EVERYONE = 0o666
"""Mode of lock files: users who may write in the folder may also lock, so that it can be shared."""


class LockError(Exception):
    """A lock that could not be taken; the message names its holder and the remedy."""


class Locks:
    """The locks of the files under one baselines folder."""

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self._folder = root / FOLDER
        self._patience = patience
        """Seconds left to wait, for all files together."""
        self._by_files = False
        """Whether locks are files, because the kernel's do not work on the file system."""

    @contextmanager
    def holding(self, path: Path) -> Iterator[Path]:
        """Hold the lock of the file ``path``; yields where the draft of its new content belongs.

        Raises :class:`LockError` where another process keeps the lock, ``OSError`` where the folder
        cannot be written.
        """
        relative = path.relative_to(self._root).as_posix()
        name = sha256(relative.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        lock = self._acquired(name)
        try:
            self._ignore()
            draft = self._folder / f"{name}.tmp"
            draft.unlink(missing_ok=True)  # of a killed writer
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            with suppress(OSError):
                (self._folder / f"{name}.holder").write_text(holder, encoding="utf-8")
            yield draft
        finally:
            self._clear(name)
            lock.release()
            self._sweep()

    def _acquired(self, name: str) -> BaseFileLock:
        from filelock import Timeout

        started = time.monotonic()
        # Each of many files gets a second even if others have used the time up.
        deadline = started + max(self._patience, 1.0)
        while True:
            self._make_folder()
            try:
                self._by_files = self._by_files or not _can_flock(self._folder / _IGNORED)
                lock = self._lock(name)
                _acquire(lock, deadline - time.monotonic())
                break
            except FileNotFoundError:  # the last writer has just removed the folder
                if time.monotonic() > deadline:
                    raise
            except Timeout:
                raise LockError(
                    f"{self._holder(name)} has been writing it for "
                    f"{time.monotonic() - started:.0f} s; run again when that has ended, or delete "
                    f"{self._folder} where no such process exists any more"
                ) from None
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

    def _clear(self, name: str) -> None:
        """Remove the lock's files while it is held: waiting writers find them gone."""
        with suppress(OSError):
            for kind in ("tmp", "holder", "lock"):
                (self._folder / f"{name}.{kind}").unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what killed writers left of other files, and the folder if it is empty then."""
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
                except OSError:  # another writer has used the folder since
                    self._ignore()

    def _holder(self, name: str) -> str:
        with suppress(OSError, ValueError):
            return printable((self._folder / f"{name}.holder").read_text(encoding="utf-8"), 100)
        with suppress(OSError, ValueError):  # process and host, where the lock is a file
            process, host = (self._folder / f"{name}.lock").read_text().split()[:2]
            return f"process {printable(process, 20)} on {printable(host, 80)}"
        return "another process"


def _can_flock(path: Path) -> bool:
    """Return whether ``path``'s file system has locks; raises ``OSError`` for a missing file."""
    try:
        import fcntl
    except ImportError:  # Windows has other locks
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
