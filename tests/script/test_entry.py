"""A script runs as ``python`` runs it."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from pytest_gpumem.script.entry import (
    Script,
    ScriptError,
    chain,
    own_frames,
    process_as_it_was,
)

TELLS = """
import json, os, pathlib, sys
found = {
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "package": __package__,
}
pathlib.Path("found.json").write_text(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("tells.py", "package/tells.py", "package/__main__.py"):
        (tmp_path / name).write_text(TELLS)
    with process_as_it_was():
        yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "package"]:
        del sys.modules[name]


def found(folder: Path) -> dict[str, object]:
    import json

    report: dict[str, object] = json.loads((folder / "found.json").read_text())
    return report


def test_a_file_runs_as_a_script(folder: Path) -> None:
    Script("package/tells.py", ("--a", "b c")).run()

    assert found(folder) == {
        "name": "__main__",
        "file": str(folder / "package" / "tells.py"),
        "main": True,
        "argv": ["package/tells.py", "--a", "b c"],
        "path": str(folder / "package"),
        "cwd": str(folder),
        "package": None,
    }


def test_a_module_and_a_package_run_as_scripts(folder: Path) -> None:
    for name, file in (("package.tells", "tells.py"), ("package", "__main__.py")):
        Script(name, ("x",), is_module=True).run()

        report = found(folder)
        assert (report["name"], report["package"]) == ("__main__", "package")
        assert report["argv"] == [str(folder / "package" / file), "x"]
        assert report["path"] == str(folder)
        assert report["main"]


def test_a_folder_with_a_main_module_runs_as_a_script(folder: Path) -> None:
    Script("package").run()
    assert found(folder)["argv"] == ["package"]


def test_an_object_of_the_script_can_be_pickled(folder: Path) -> None:
    (folder / "made.py").write_text(
        "import pathlib, pickle\nclass Made: ...\n"
        "pathlib.Path('made.pickle').write_bytes(pickle.dumps(Made()))\n"
    )
    Script("made.py").run()
    made = pickle.loads((folder / "made.pickle").read_bytes())
    assert type(made) is sys.modules["__main__"].Made


def test_the_state_of_the_process_is_restored_after_a_script(folder: Path) -> None:
    before = sys.argv, sys.modules["__main__"], list(sys.path)
    with process_as_it_was():
        Script("tells.py").run()
        assert sys.argv == ["tells.py"]
    assert (sys.argv, sys.modules["__main__"], sys.path) == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"import torch\ndef f(:\n", "'x.py', line 2: SyntaxError: "),
        (b"if 1:\npass\n", "'x.py', line 2: IndentationError: "),
        (b"\x7fELF\0\0", "'x.py'"),
        (b"\xff\xfe = 1", "'x.py'"),
    ],
)
def test_a_file_of_no_python_is_one_sentence(folder: Path, content: bytes, sentence: str) -> None:
    (folder / "x.py").write_bytes(content)
    with pytest.raises(ScriptError, match=sentence) as refused:
        Script("x.py").check()
    assert "\n" not in str(refused.value)


def test_an_absent_script_is_one_sentence(folder: Path) -> None:
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    for name, sentence in (
        ("absent.py", "there is no script 'absent.py'"),
        ("no\0name", "there is no script"),
        ("empty", "'empty' is a folder without a __main__.py; give a script"),
        ("pipe", "'pipe' is not a file; give a script"),
    ):
        with pytest.raises(ScriptError, match=sentence):
            Script(name).check()
    for name in ("absent", "package.absent", "absent.x", ".x"):
        Script(name, is_module=True).check()  # finding a module imports its packages
        with pytest.raises(ScriptError, match="there is no module"):
            Script(name, is_module=True).run()


RAISES = dedent(
    """
    def inner():
        raise KeyError("x")

    def outer():
        try:
            inner()
        except KeyError:
            raise ValueError("y")

    outer()
    """
)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_traceback_begins_with_the_script(folder: Path, as_module: bool) -> None:
    (folder / "raises.py").write_text(RAISES)
    script = Script("raises", is_module=True) if as_module else Script("raises.py")
    with pytest.raises(ValueError, match="y") as raised:
        script.run()

    assert raised.value.__traceback__ is not None
    shown = traceback.extract_tb(own_frames(raised.value.__traceback__.tb_next))
    assert [(Path(one.filename).name, one.lineno) for one in shown] == [
        ("raises.py", 11),
        ("raises.py", 9),
    ]
    assert [type(one) for one in chain(raised.value)] == [ValueError, KeyError]
