"""Memory of the machine that simulates."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

_GROUPS = (
    # cgroup v2 and v1: the limit and the use, in bytes.
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that new allocations can take, by the system and by the container.

    Only Linux has files with these numbers; elsewhere psutil reads them.
    """
    bounds = []
    with suppress(OSError):
        known = (root / "proc/meminfo").read_text(encoding="ascii")
        found = re.search(r"^MemAvailable:\s+(\d+) kB", known, re.M)
        bounds += [int(found[1]) * 1024] if found else []
    if not bounds:
        bounds.append(psutil.virtual_memory().available)
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            most, taken = (int((root / name).read_text(encoding="ascii")) for name in (limit, used))
            bounds.append(max(most - taken, 0))
    return min(bounds)
