from pathlib import Path

import pytest

from pytest_gpumem.jsonfile import replace_file, schema_problem


def test_a_file_is_replaced_and_its_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_schema_problem_says_what_and_where() -> None:
    report = {"schema_version": 1, "environment": None, "tests": [{"nodeid": "t.py::test"}]}
    problem = schema_problem("pytest_gpumem.report", report)
    assert problem == "'outcome' is a required property at $.tests[0]"
    assert schema_problem("pytest_gpumem.report", {**report, "tests": []}) is None


def test_a_long_value_in_a_schema_problem_is_cut() -> None:
    problem = schema_problem("pytest_gpumem.report", ["x" * 500])
    assert problem is not None
    assert problem.endswith("... at $")
    assert len(problem) < 140
