"""Modules that the code under test imports are changed as soon as they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gpumem.garbage import clear_frames_of_imports
from pytest_gpumem.late_modules import when_imported

NAME = "module_of_late_modules"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{NAME}.py").write_text("seen = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(NAME, None)


def adding(word: str) -> Callable[[ModuleType], None]:
    return lambda module: module.seen.append(word)


def test_a_module_is_changed_as_soon_as_it_is_imported() -> None:
    with when_imported({NAME: adding("changed")}):
        assert importlib.import_module(NAME).seen == ["changed"]


def test_a_module_imported_before_is_changed_at_once() -> None:
    there = importlib.import_module(NAME)
    with when_imported({NAME: adding("changed")}):
        assert there.seen == ["changed"]


def test_a_module_imported_after_the_context_is_not_changed() -> None:
    with when_imported({NAME: adding("changed")}):
        pass
    assert importlib.import_module(NAME).seen == []


def test_two_changes_of_one_module_are_both_applied() -> None:
    with when_imported({NAME: adding("outer")}), when_imported({NAME: adding("inner")}):
        assert sorted(importlib.import_module(NAME).seen) == ["inner", "outer"]


def test_a_module_is_changed_although_its_import_clears_frames() -> None:
    with clear_frames_of_imports(), when_imported({NAME: adding("changed")}):
        assert importlib.import_module(NAME).seen == ["changed"]
