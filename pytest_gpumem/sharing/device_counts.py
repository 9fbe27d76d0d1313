"""The number of devices that a test uses: by its marker, or as seen when it ran on this host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.sharing.database import Database, default_folder

FILE_NAME = "reach.sqlite3"
KEPT = 30 * 86_400.0
"""Seconds for which a test that has not run again is remembered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS reach (
    project TEXT NOT NULL, nodeid TEXT NOT NULL, devices INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (project, nodeid)) WITHOUT ROWID;
"""


class DeviceCounts:
    """The tests of ``project`` that use more than their worker's own device.

    On a host with several devices the numbers are stored. Raises ``SharingError`` where they cannot
    be read or written.
    """

    def __init__(self, project: Path) -> None:
        self._project = str(project)
        self._declared: dict[str, int] = {}
        self._database: Database | None = None

    def remember(self, devices: int) -> None:
        """Store from now on how many devices tests use, if there are several ``devices``."""
        if devices > 1 and self._database is None:
            self._database = Database(default_folder() / FILE_NAME, _SCHEMA)

    def declare(self, nodeid: str, gpus: Sequence[str]) -> None:
        """Record the marker's ``gpu``: ``"A100-80GB*2"`` means two devices."""
        _, star, number = (gpus[0] if gpus else "").partition("*")
        if star and number.strip().isdecimal():
            self._declared[nodeid] = int(number)

    def of(self, nodeid: str) -> int:
        """Return how many devices the test uses; 1 if unknown."""
        return self._declared.get(nodeid) or self._learned(nodeid)

    def learn(self, record: Mapping[str, Any]) -> None:
        """Store how many devices, counted from the first, the test of a record has allocated on."""
        if self._database is None:
            return
        others = [one["device"].partition(":")[2] for one in record["other_devices"]]
        devices = 1 + max(map(int, others), default=0)
        if devices == self._learned(record["nodeid"]) == 1:
            return
        now = time.time()
        with self._database.transaction():
            self._database.execute("DELETE FROM reach WHERE time < ?", (now - KEPT,))
            self._database.execute(
                "INSERT OR REPLACE INTO reach VALUES (?, ?, ?, ?)",
                (self._project, record["nodeid"], devices, now),
            )

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _learned(self, nodeid: str) -> int:
        if self._database is None:
            return 1
        found = self._database.execute(
            "SELECT devices FROM reach WHERE project = ? AND nodeid = ?", (self._project, nodeid)
        ).fetchone()
        return int(found[0]) if found else 1
