"""Plain words: the prose of the package has things as subjects and verbs that say what happens."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_gpumem

FOLDER = Path(pytest_gpumem.__file__).parent

NO_SUBJECTS = re.compile(
    r"\b([Nn]obody|[Ss]omebody|[Ww]hoever|[Aa]nybody|[Ee]verybody|[Ss]omeone)\b"
)
"""Words that leave out which thing does it: a user, the code under test, another process."""
CODE = re.compile(r"``[^`]*``")

OPENINGS = re.compile(r"^(Let|What|Whatever|Who|How|Be|As if|Those|It|They|So that|Where|If)\b")
"""First words of a docstring that begins with a clause or a pronoun instead of a noun or a verb."""

Prose = tuple[int, str]
"""A line of a file, and the words that begin there."""


def docstrings(tree: ast.AST) -> Iterator[Prose]:
    """Yield every string that stands alone as a statement: of modules, functions, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def messages(tree: ast.AST) -> Iterator[Prose]:
    """Yield every other string that has several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[Prose]:
    """Yield every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def faults(source: str) -> list[Prose]:
    """Return the prose in ``source`` that the rules forbid."""
    tree = ast.parse(source)
    found = {each for each in docstrings(tree) if OPENINGS.match(each[1].strip())}
    if not NO_SUBJECTS.search(source):  # most files: no need to look where it stands
        return sorted(found)
    for each in (*messages(tree), *comments(source)):
        if NO_SUBJECTS.search(CODE.sub("", each[1])):
            found.add(each)
    return sorted(found)


@pytest.mark.parametrize("folder", ["pytest_gpumem"])
def test_prose_of_the_package_contains_no_fault(folder: str) -> None:
    found = [
        f"{path.relative_to(FOLDER.parent)}:{line}: {prose.strip().splitlines()[0]}"
        for path in sorted((FOLDER.parent / folder).rglob("*.py"))
        for line, prose in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ('"""Let a stage be alone in its vote."""', True),
        ('"""What it was not."""', True),
        ('X = 1\n"""What the kernel takes."""', True),
        ("x = 1  # as if nobody watched", True),
        ('raise ValueError("somebody else holds the lock")', True),
        ('"""Return the bytes that the kernel takes."""', False),
        ('x = "nobody"', False),
    ],
)
def test_forbidden_prose_is_found_as_a_fault(source: str, is_fault: bool) -> None:
    assert bool(faults(source)) is is_fault
