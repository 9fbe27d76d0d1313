"""Kinds of stacks that are recorded, by platform."""

from __future__ import annotations

import platform

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.measurement.recorded import RecordedHistory


@pytest.mark.parametrize(
    ("system", "machine", "version", "stacks"),
    [
        ("Linux", "x86_64", "2.6.0+cu124", "all"),
        ("Linux", "aarch64", "2.11.0", "python"),
        ("Linux", "aarch64", "2.13.0", "all"),
        ("Windows", "AMD64", "2.13.0", "python"),
    ],
)
def test_cpp_frames_are_requested_where_torch_can_record_them(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, version: str, stacks: str
) -> None:
    asked: list[object] = []

    def record(enabled: str | None, context: str = "", stacks: str = "") -> None:
        asked.append((enabled, stacks))

    with simulate("T4"):
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
        with RecordedHistory().during("all"):
            pass
        monkeypatch.undo()

    assert asked == [("all", stacks), (None, "")]
