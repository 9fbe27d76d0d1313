"""Command lines to paste: they repeat options, and pytest finds the same rootdir by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.quoting import quoted_for_shell
from pytest_gpumem.report.commands import PLAIN, Command

pytest_plugins = ("pytester",)


def started(pytester: pytest.Pytester, *args: str) -> Command:
    return Command.of(pytester.parseconfig(*args))


def test_a_test_has_its_node_id_where_the_command_line_is_unknown() -> None:
    assert PLAIN.records("a/test_b.py::test_c[x y]") == (
        'pytest --gpumem-update-baselines "a/test_b.py::test_c[x y]"'
    )


@pytest.mark.parametrize(
    ("given", "options", "choosing"),
    [
        (["-vvx", "-rA", "-n2", "--tb", "short", "--junitxml=x.xml", "-q", "--lf"], [], []),
        (["--gpumem-update-baselines=new", "--gpumem-rows", "5", "--gpumem-all"], [], []),
        (["-p", "no:xdist", "-pno:timeout"], [], []),
        (["-W", "error", "--strict-markers"], ["-W", "error", "--strict-markers"], []),
        (
            ["--gpumem-device", "sim:T4", "--import-mode=importlib"],
            ["--gpumem-device", "sim:T4", "--import-mode=importlib"],
            [],
        ),
        (["-k", "a and b", "-m", "not slow"], [], ["-k", "a and b", "-m", "not slow"]),
        (["--deselect=a.py::b"], [], ["--deselect=a.py::b"]),
    ],
    ids=str,
)
def test_options_that_matter_are_repeated(
    pytester: pytest.Pytester, given: list[str], options: list[str], choosing: list[str]
) -> None:
    command = started(pytester, *given)
    kept = [word for word in command.options if "basetemp" not in word]
    kept = [word for word in kept if word not in ("-p", "pytest_gpumem.plugin")]
    assert (kept, list(command.choosing)) == (options, choosing)


def test_a_value_that_reads_like_a_path_stays_with_its_option(pytester: pytest.Pytester) -> None:
    pytester.mkdir("tests")
    command = started(pytester, "--rootdir", "tests", "-k", "tests", "tests")
    assert command.paths == ("tests",)
    assert command.again("--x").endswith('--rootdir tests --x -k tests "tests"')


def at(root: Path, folder: str, inipath: str = "") -> Command:
    return Command(
        folder=str(root / folder), rootdir=str(root), inipath=inipath and str(root / inipath)
    )


def test_a_test_is_named_from_where_pytest_was_started(tmp_path: Path) -> None:
    command = at(tmp_path, "docs", "pytest.ini")
    assert command.records("tests/test_a.py::test_b") == (
        'pytest --gpumem-update-baselines "../tests/test_a.py::test_b"'
    )


def test_the_rootdir_is_given_where_pytest_would_find_another(tmp_path: Path) -> None:
    # Without a configuration, the rootdir is the common ancestor of the folder and the test.
    assert "--rootdir" not in at(tmp_path, ".").records("tests/test_a.py::test_b")
    assert "--rootdir=.. " in at(tmp_path, "tests").records("tests/test_a.py::test_b")
    # With one, it is the folder of the nearest.
    nested = tmp_path / "package"
    nested.mkdir()
    (nested / "pytest.ini").touch()
    command = at(tmp_path, ".", "pytest.ini")
    assert command.records("package/tests/test_a.py::test_b").startswith(
        "pytest --rootdir=. -c pytest.ini --gpumem-update-baselines "
    )
    assert "--rootdir" not in command.records("tests/test_a.py::test_b")


def test_a_rootdir_that_was_given_is_given_once(tmp_path: Path) -> None:
    command = Command(
        options=("--rootdir=..",), folder=str(tmp_path / "tests"), rootdir=str(tmp_path)
    )
    assert command.records("tests/test_a.py::b") == (
        'pytest --rootdir=.. --gpumem-update-baselines "test_a.py::b"'
    )


def test_a_command_line_is_sent_to_workers_as_builtin_types() -> None:
    command = Command(options=("-o", "a=b"), choosing=("-k", "x"), paths=("t",), cached=False)
    data = command.to_dict()
    assert {type(value) for value in data.values()} == {list, str, bool}
    assert data["options"] == ["-o", "a=b"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a b", '"a b"'),
        ('a"$b`\\', '"a\\"\\$b\\`\\\\"'),
        ("it's", '"it\'s"'),
        ("wow!", "'wow!'"),
    ],
)
def test_a_word_is_quoted_for_the_shell(text: str, word: str) -> None:
    assert quoted_for_shell(text) == word
