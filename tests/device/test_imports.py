"""``clear_frames_of_imports``: an import keeps no local variable of its caller alive."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_gpumem.garbage import clear_frames_of_imports

OWN_FRAME = """
import inspect

def note():
    frame = inspect.currentframe()  # which refers to itself now

note()
"""

STORED_EXCEPTION = """
try:
    import there_is_no_such_module
except ImportError as error:
    reason = error
"""

CYCLE_WITH_AN_EXCEPTION = """
def attempt():
    try:
        raise ValueError("no")
    except ValueError as error:
        kept = error

attempt()
"""


class Anything:
    """An object that supports weak references."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    gc.disable()
    yield tmp_path
    gc.enable()
    gc.collect()
    sys.modules.pop("leaves_frames", None)


def import_beside_a_variable() -> weakref.ref[Anything]:
    variable = Anything()
    import leaves_frames  # type: ignore[import-not-found]  # noqa: F401  # a test writes it

    return weakref.ref(variable)


@pytest.mark.parametrize("source", [OWN_FRAME, STORED_EXCEPTION, CYCLE_WITH_AN_EXCEPTION])
def test_a_variable_of_the_importer_is_freed_with_its_function(folder: Path, source: str) -> None:
    (folder / "leaves_frames.py").write_text(source)
    with clear_frames_of_imports():
        assert import_beside_a_variable()() is None


@pytest.mark.parametrize("source", [OWN_FRAME, STORED_EXCEPTION, CYCLE_WITH_AN_EXCEPTION])
def test_a_variable_of_the_importer_lives_on_without_the_context(folder: Path, source: str) -> None:
    (folder / "leaves_frames.py").write_text(source)
    assert import_beside_a_variable()() is not None


def test_a_stored_exception_loses_its_traceback_alone(folder: Path) -> None:
    (folder / "leaves_frames.py").write_text(STORED_EXCEPTION)
    with clear_frames_of_imports():
        import_beside_a_variable()
    reason = sys.modules["leaves_frames"].reason
    assert str(reason) == "No module named 'there_is_no_such_module'"
    assert reason.__traceback__ is None


def test_a_module_keeps_its_own_loader(folder: Path) -> None:
    (folder / "leaves_frames.py").write_text("loader = __loader__, __spec__.loader")
    with clear_frames_of_imports():
        import_beside_a_variable()
    module = sys.modules["leaves_frames"]
    expected = importlib.util.spec_from_file_location("other", folder / "leaves_frames.py")
    assert expected is not None
    assert {type(loader) for loader in (*module.loader, module.__loader__)} == {
        type(expected.loader)
    }


def test_find_spec_returns_the_unchanged_spec(folder: Path) -> None:
    (folder / "leaves_frames.py").write_text("")
    with clear_frames_of_imports():
        spec = importlib.util.find_spec("leaves_frames")
    assert spec == importlib.util.find_spec("leaves_frames")


def test_an_error_of_the_module_is_raised_unchanged(folder: Path) -> None:
    (folder / "leaves_frames.py").write_text("1 / 0")
    with clear_frames_of_imports(), pytest.raises(ZeroDivisionError) as raised:
        import_beside_a_variable()
    assert str(raised.traceback[-1].path).endswith("leaves_frames.py")


def test_sys_meta_path_is_restored_afterwards() -> None:
    before = list(sys.meta_path)
    with clear_frames_of_imports():
        assert sys.meta_path[1:] == before
    assert sys.meta_path == before
