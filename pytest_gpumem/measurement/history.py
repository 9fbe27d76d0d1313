"""The origins of allocations: the device's own recording, and snapshots of it as files."""

from __future__ import annotations

import pickle
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

from pytest_gpumem.jsonfile import replace_file

LONGEST_NAME = 120
"""Characters of a test's id in a file name; the rest is replaced by a digest."""


@contextmanager
def recording(stacks: str | None) -> Iterator[None]:
    """Record the allocator's events and their stacks inside.

    ``stacks`` is ``python`` or ``all`` (C++ frames too, where torch can unwind them); ``None``
    records nothing, the default on a GPU because stacks cost time. A simulated device records
    Python frames in any case.
    """
    if stacks is None:
        yield
        return
    if not _unwinds_cpp():
        stacks = "python"
    torch.cuda.memory._record_memory_history("all", context="all", stacks=stacks)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def _unwinds_cpp() -> bool:
    """Return whether torch finds C++ frames; elsewhere it warns or raises at the first allocation.

    Source: torch/csrc/profiler/unwind/unwind.cpp; Arm is in the first release known to have it.
    """
    if platform.system() != "Linux":
        return False
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return platform.machine() in (("x86_64", "aarch64") if release >= (2, 13) else ("x86_64",))


def write_snapshot(folder: Path, nodeid: str) -> Path:
    """Write the allocator's snapshot as a pickle that PyTorch's memory_viz opens; return its path.

    Raises ``OSError`` where the folder cannot be written.
    """
    path = folder / f"{_file_name(nodeid)}.pickle"
    replace_file(path, pickle.dumps(torch.cuda.memory._snapshot()))
    return path


def _file_name(nodeid: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._\[\]-]+", "-", nodeid)
    if name == nodeid and len(name) <= LONGEST_NAME:
        return name
    # Two ids must not share a file because of the characters that were replaced.
    return f"{name[:LONGEST_NAME]}-{sha256(nodeid.encode()).hexdigest()[:8]}"
