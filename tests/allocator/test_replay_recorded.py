"""Traces recorded on real GPUs, event by event.

They lie outside this repository: $GPUMEM_GROUNDTRUTH names the folder that holds ``snapshots/``.
"""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.allocator import replay

GROUNDTRUTH = Path(
    os.environ.get("GPUMEM_GROUNDTRUTH", Path(__file__).parents[4] / "shared" / "groundtruth")
)
SNAPSHOTS = GROUNDTRUTH / "snapshots"
MISSING = f"recorded traces are not in {SNAPSHOTS}; set GPUMEM_GROUNDTRUTH"


def manifest() -> list[Any]:
    path = SNAPSHOTS / "MANIFEST.json"
    if not path.exists():
        return [pytest.param({}, id="none", marks=pytest.mark.skip(reason=MISSING))]
    return [pytest.param(entry, id=entry["file"]) for entry in json.loads(path.read_text())]


@pytest.fixture
def unpacked(recorded: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(lzma.decompress((SNAPSHOTS / recorded["file"]).read_bytes()))
    return path


@pytest.mark.parametrize("recorded", manifest())
def test_every_recorded_event_is_replayed(recorded: dict[str, Any], unpacked: Path) -> None:
    result = replay(unpacked)

    allocations = sum(device["allocs"] for device in recorded["devices"].values())
    assert result.first_mismatch is None
    assert (result.exact_addresses, result.total) == (allocations, allocations)
    assert result.exact


@pytest.mark.parametrize("recorded", manifest())
def test_replayed_peaks_equal_the_recorded_peaks(recorded: dict[str, Any], unpacked: Path) -> None:
    known = [device["peak_alloc_reserved"] for device in recorded["devices"].values()]
    if None in known:
        pytest.skip("the manifest has no peaks for this trace")

    result = replay(unpacked)

    assert [result.peak_allocated, result.peak_reserved] == max(known)
