"""Modules first imported during a simulation: unpatched, or only when they are needed."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pytest_gpumem.simulated.common.late_imports import StandIn, imported_unpatched

PACKAGE = {
    "__init__.py": "import slow.part, slow.strict\nsize = 3\nstate = slow.part.state",
    "part.py": "import settings\nstate = settings.replaced",
    "other.py": "import settings\nstate = settings.replaced",
    "collected.py": "import gc\nstate = gc.isenabled()",
    "strict.py": """
import sys, types

class Strict(types.ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError(name)

sys.modules[__name__].__class__ = Strict
""",
}
"""Takes over what it finds, as torch's compilers do."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "slow").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "slow" / name).write_text(text)
    (tmp_path / "settings.py").write_text("replaced = True")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("settings")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slow", "settings")]:
        del sys.modules[name]


@contextmanager
def unpatched() -> Iterator[None]:
    settings: Any = sys.modules["settings"]
    settings.replaced = False
    yield
    settings.replaced = True


def ask_for_size() -> Any:
    import slow  # type: ignore[import-not-found]

    return slow.size


@contextmanager
def slow_kept_out() -> Iterator[StandIn]:
    def answers(name: str, asking: FrameType) -> Any:
        return "answered" if asking.f_code is ask_for_size.__code__ else None

    stand_in = StandIn("slow", answers, unpatched)
    with stand_in.in_place(), imported_unpatched("slow", unpatched):
        yield stand_in


@pytest.mark.usefixtures("project")
def test_an_answer_of_the_stand_in_imports_nothing() -> None:
    with slow_kept_out() as stand_in:
        assert ask_for_size() == "answered"
        assert sys.modules["slow"] is stand_in
        assert "slow.part" not in sys.modules
    assert "slow" not in sys.modules
    assert ask_for_size() == 3


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "statement",
    ["import slow; slow.size", "from slow import size", "from slow import *", "import slow.other"],
)
def test_other_uses_import_the_real_module_unpatched(statement: str) -> None:
    with slow_kept_out() as stand_in:
        exec(statement, {})
        real = sys.modules["slow"]
        assert real is not stand_in
        assert ask_for_size() == 3
        assert stand_in.state is False
    assert sys.modules["slow"] is real
    assert real.state is False


@pytest.mark.usefixtures("project")
def test_an_excepted_submodule_is_imported_with_the_patches() -> None:
    stand_in = StandIn("slow", lambda name, asking: None, unpatched)
    with stand_in.in_place(), imported_unpatched("slow", unpatched, but=("slow.other",)):
        other: Any = importlib.import_module("slow.other")
        part: Any = importlib.import_module("slow.part")
    assert (other.state, part.state) == (True, False)


@pytest.mark.usefixtures("project")
def test_a_submodule_imported_by_its_package_runs_once() -> None:
    with slow_kept_out():
        part = importlib.import_module("slow.part")
        assert part is sys.modules["slow"].slow.part
    assert part.__spec__ is not None
    assert isinstance(part.__spec__.loader, SourceFileLoader)


@pytest.mark.usefixtures("project")
def test_a_submodule_may_refuse_new_attributes() -> None:
    # Modules of settings do, such as torch._dynamo.config.
    with slow_kept_out():
        strict = importlib.import_module("slow.strict")
    assert strict.__spec__ is not None
    assert isinstance(strict.__spec__.loader, SourceFileLoader)


@pytest.mark.usefixtures("project")
def test_a_module_imported_unpatched_has_its_own_loader() -> None:
    with slow_kept_out():
        other: Any = importlib.import_module("slow.other")
    assert other.state is False
    assert isinstance(other.__loader__, SourceFileLoader)
    assert other.__spec__.loader is other.__loader__


@pytest.mark.usefixtures("project")
def test_the_garbage_collector_is_off_during_the_import() -> None:
    """A finalizer may start a thread that waits for the import, which would wait for the thread."""
    with slow_kept_out():
        collected: Any = importlib.import_module("slow.collected")
    assert collected.state is False
    assert gc.isenabled()


@pytest.mark.usefixtures("project")
def test_attributes_are_set_and_deleted_on_the_real_module() -> None:
    with slow_kept_out() as stand_in:
        stand_in.size = 5
        assert sys.modules["slow"].size == 5
        del stand_in.state
        assert not hasattr(sys.modules["slow"], "state")
        assert "size" in dir(stand_in)


@pytest.mark.usefixtures("project")
def test_dunder_attributes_and_find_spec_import_nothing() -> None:
    with slow_kept_out() as stand_in:
        for name in ("__file__", "__name__", "__spec__", "__warningregistry__"):
            hasattr(sys.modules["slow"], name)
        assert find_spec("slow") is stand_in.__spec__
        assert sys.modules["slow"] is stand_in


def test_a_failed_import_may_be_repeated(tmp_path: Path, project: Any) -> None:
    (tmp_path / "slow" / "__init__.py").write_text("import settings\nsize = 1 / settings.divisor")
    project.divisor = 0
    with slow_kept_out() as stand_in:
        with pytest.raises(ZeroDivisionError):
            dir(stand_in)
        assert ask_for_size() == "answered"
        project.divisor = 2
        assert stand_in.size == 0.5


@pytest.mark.usefixtures("project")
def test_a_missing_submodule_raises_module_not_found_error() -> None:
    with slow_kept_out():
        assert find_spec("slow.absent") is None
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'slow.absent'"):
            importlib.import_module("slow.absent")
