"""Functions and tests that a command's TARGET names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gpumem.cli.target import find_target


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_it.py").write_text("NUMBER = 7\n")
    (tmp_path / "training_script.py").write_text(
        "from beside_it import NUMBER\n"
        "def step():\n    return NUMBER\n"
        "def needs(x):\n    return x\n"
        "async def coroutine(): ...\ndef generator():\n    yield\nasync def both():\n    yield\n"
        "class Holder:\n    @staticmethod\n    def step():\n        return 8\n"
    )
    (tmp_path / "broken_script.py").write_text("1 / 0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("training_script:step", 7),
        ("training_script.py:step", 7),
        ("training_script:Holder.step", 8),
    ],
)
def test_a_target_is_a_function_of_a_module_or_a_file(project: Path, text: str, value: int) -> None:
    target = find_target(text)
    assert not isinstance(target, str)
    assert target() == value


def test_a_target_is_a_test_id(project: Path) -> None:
    (project / "test_it.py").touch()
    assert find_target("test_it.py::TestX::test_y[a:b]") == "test_it.py::TestX::test_y[a:b]"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("coroutine", "a coroutine"),
        ("generator", "a generator"),
        ("both", "an asynchronous generator"),
    ],
)
def test_a_function_of_which_a_call_runs_nothing_is_refused(
    project: Path, name: str, kind: str
) -> None:
    sentence = f"{name}() is {kind}, of which a call runs nothing; name a function that runs it"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        find_target(f"training_script:{name}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "step",
            "'step' is not a target; write module:function, path.py:function or path.py::test",
        ),
        ("nowhere.py:step", "nowhere.py:step: there is no file nowhere.py"),
        ("nowhere.py::test", "nowhere.py::test: there is no file nowhere.py"),
        ("training_script:nothing", "training_script:nothing: training_script has no nothing"),
        (
            "broken_script:step",
            "broken_script:step: importing broken_script raised ZeroDivisionError: "
            "division by zero",
        ),
        (
            "training_script:needs",
            "training_script:needs: needs() cannot be called without arguments (missing a "
            "required argument: 'x'); name a function that makes what it needs itself",
        ),
        ("training_script:Holder.nothing", "training_script has no Holder.nothing"),
    ],
)
def test_a_wrong_target_is_refused_in_one_sentence(project: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        find_target(text)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import pytest; pytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
    ],
)
def test_a_module_that_exits_during_import_is_refused(
    tmp_path: Path, body: str, reason: str
) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(body)
    with pytest.raises(ValueError, match=f"importing {path} raised {reason}"):
        find_target(f"{path}:train")
