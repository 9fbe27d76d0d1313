"""Files and names in the pages for contributors exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGE = REPOSITORY / "pytest_gpumem"
SUFFIXES = {".py", ".c", ".js", ".json"}
FILES = [path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in FILES)


@pytest.mark.parametrize("page", ["where_to_look.md", "how_a_test_runs.md"])
def test_every_file_and_name_of_a_page_is_in_the_package(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    for code in re.findall(r"`([^`]+)`", text):
        if code.startswith(("pytest ", "python ")):
            paths = [word for word in code.split() if "/" in word]
            assert all((REPOSITORY / path).exists() for path in paths), code
        elif code.endswith(tuple(SUFFIXES)):
            assert any(path.as_posix().endswith(f"/{code}") for path in FILES), code
        else:
            unknown = [word for word in re.findall(r"\w+", code) if word not in SOURCE]
            assert not unknown, code


@pytest.mark.parametrize("page", ["where_to_look.md", "how_a_test_runs.md"])
def test_a_name_in_brackets_behind_a_file_is_in_that_file(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    for file, name in re.findall(r"`([\w/]+\.py)`(?: \(|: )`([\w.]+)", text):
        found = [path for path in FILES if path.as_posix().endswith(f"/{file}")]
        word = name.rpartition(".")[2]
        assert any(word in path.read_text(encoding="utf-8") for path in found), (file, name)
