"""Available memory of the machine that runs the simulation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pytest_gpumem.simulated.machine.values.reading import available_memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_available_memory_is_read_from_the_system(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n"})

    assert available_memory(tmp_path) == 2048 * 1024


def test_a_container_may_have_less_memory_than_the_system(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 2048 kB\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
            "sys/fs/cgroup/memory.current": "400000\n",
        },
    )

    assert available_memory(tmp_path) == 600_000


def test_a_container_without_a_limit_has_the_systems_memory(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 2048 kB\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "400000\n",
        },
    )

    assert available_memory(tmp_path) == 2048 * 1024


def test_psutil_is_asked_on_a_system_without_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 30))

    assert available_memory(tmp_path) == 3 << 30
