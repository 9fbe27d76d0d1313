"""The folder that the processes of one user on one host share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE, default_folder


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "tmp")


def test_every_user_has_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000, raising=False)
    assert default_folder() == Path("tmp/pytest-gpumem-1000")


def test_windows_distinguishes_users_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getuid", raising=False)
    monkeypatch.setenv("USERNAME", "ada")
    assert default_folder() == Path("tmp/pytest-gpumem-ada")


def test_a_given_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "shared")
    assert default_folder() == Path("shared")
