"""Memory of the machine that simulates."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

_GROUPS = (
    # cgroup v2 and v1: the limit and what is in use, in bytes.
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new allocations can take: what the system says is free, and the container.

    Where neither is known, all of the installed memory, and without that no bound at all.
    """
    bounds = [sys.maxsize]
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
        bounds += [int(found[1]) * 1024] if found else []
    if len(bounds) == 1:
        with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
            bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            room = int((root / limit).read_text()) - int((root / used).read_text())
            bounds.append(max(room, 0))
    return min(bounds)
