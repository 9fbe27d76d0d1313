"""Paths as messages show them, also across drives of Windows."""

from __future__ import annotations

import ntpath
import os
from pathlib import Path

import pytest

from pytest_gpumem.paths import relative


def test_a_path_is_shown_relative_to_the_folder() -> None:
    assert relative(Path("/a/b/c.py"), "/a") == os.path.join("b", "c.py")  # noqa: PTH118
    assert relative("/a/b", "/a/d") == os.path.join("..", "b")  # noqa: PTH118


def test_a_path_on_another_drive_of_windows_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "relpath", ntpath.relpath)

    assert relative(r"D:\baselines", r"C:\project") == r"D:\baselines"
    assert relative(r"C:\project\baselines", r"C:\project") == "baselines"
