"""The lock of a folder for one writer at a time, and the path of the writer's draft.

It is in ``<root>/.gpumem-locks``, which contains a .gitignore and is not deleted, like pytest's
cache. It is a lock of the kernel (``flock``, which Linux forwards to an NFS server), which ends
with its process. On a file system without a working ``flock``, such as some NFS and FUSE servers,
the existence of the file is the lock, and it contains process and host; the file of a killed writer
is removed on that host, and an error message names it on another.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_gpumem.quoting import printable

FOLDER = ".gpumem-locks"
PATIENCE = 60.0
"""Seconds to wait; a write takes a second or two."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EIO})
"""Errors of ``flock`` where it does not work: not implemented, no lock daemon (NFS), not supported,
or FUSE's error for an unknown reply. filelock handles only the first."""

_EVERYONE = 0o666
"""Mode of the lock file: all users who may write to the folder may also lock it."""


class LockError(Exception):
    """A lock that could not be taken; the message names its holder and the remedy."""


class Locks:
    """The lock of one folder, such as that of the baselines."""

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self._folder = root / FOLDER
        self._patience = patience
        """Seconds left to wait, for all writes together."""

    @contextmanager
    def holding(self) -> Iterator[Path]:
        """Hold the lock; yields the path for the draft of a file's new content.

        Raises :class:`LockError` where another process keeps the lock, ``OSError`` where the folder
        cannot be written.
        """
        from filelock import FileLock, SoftFileLock, Timeout

        self._make_folder()
        kind = FileLock if _can_flock(self._folder / ".gitignore") else SoftFileLock
        lock = kind(self._folder / "lock", mode=_EVERYONE)
        holder, draft = self._folder / "holder", self._folder / "draft"
        started = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # filelock warns on a file system without flock
                # Each write waits for a second even if earlier ones have used the time up.
                lock.acquire(timeout=max(self._patience, 1.0))
        except Timeout:
            name = "another process"
            with suppress(OSError, ValueError):
                name = printable(holder.read_text(encoding="utf-8"), 100)
            raise LockError(
                f"{name} has been writing it for {time.monotonic() - started:.0f} s; run again "
                f"when that has ended, or delete {self._folder} where no such process exists any "
                "more"
            ) from None
        finally:
            self._patience -= time.monotonic() - started
        try:
            for path in (holder, draft):  # left by an earlier writer, perhaps a killed one
                path.unlink(missing_ok=True)
            with suppress(OSError):
                name = f"process {os.getpid()} on {socket.gethostname()}"
                holder.write_text(name, encoding="utf-8")
            yield draft
        finally:
            lock.release()

    def _make_folder(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._folder.mkdir()
            with suppress(OSError):
                self._folder.chmod(self._root.stat().st_mode & 0o7777)
        with suppress(FileExistsError), (self._folder / ".gitignore").open("xb") as file:
            file.write(b"*\n")


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
