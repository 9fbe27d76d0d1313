"""Simulated needs of tests whose needs are unknown, before they run on a real GPU.

Without it each of them runs alone once, and the other workers wait. A simulated run costs a pytest
of its own, some seconds of a CPU, and no time of the GPU. So it is done where several workers
would wait for several such tests, once for a host's workers of a run, and its result is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pytest_gpumem.jsonfile import replace_file

LEAST = 4
"""The least number of unknown tests; fewer have run alone before a simulation begins."""

PATIENCE = 120.0
"""Seconds after which the simulation begins no other test: remaining ones run alone."""

KEPT = 86_400.0
"""Seconds for which a result is left to other workers of its run."""

_PREFIX = "foreseen-"


def is_worth_it(unknown: int, workers: int) -> bool:
    """Return whether ``unknown`` tests are to be simulated for a run of so many workers."""
    return workers > 1 and unknown >= LEAST


def foreseen(folder: Path, run: str, simulate: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """Return bytes by node id from ``simulate``, 0 for tests that cannot be simulated.

    The first worker of ``run`` in the ledger's ``folder`` calls it; others wait for its
    result. One that is killed in the process leaves the work to the next.
    """
    from filelock import FileLock

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    answer = folder / f"{_PREFIX}{run}.json"
    with FileLock(answer.with_suffix(".lock")):
        with suppress(OSError, ValueError):
            found: dict[str, int] = json.loads(answer.read_bytes())
            return found
        _clear(folder)
        found = dict(simulate())
        replace_file(answer, json.dumps(found).encode("ascii"))
    return found


def _clear(folder: Path) -> None:
    """Remove the files that runs of earlier days have left."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - KEPT:
                path.unlink()
