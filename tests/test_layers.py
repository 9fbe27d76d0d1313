"""Imports between rooms: no two rooms import each other, and ``simulated`` imports downward only.

Read from the source, so that imports inside functions and for types alone count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pytest_gpumem

FOLDER = Path(pytest_gpumem.__file__).parent
PACKAGE = FOLDER.name
SIMULATED = f"{PACKAGE}.simulated"

MOST_LINES = 450
"""The maximum length of a file; a longer one states its reason after these words."""
REASON = f"More than {MOST_LINES} lines, because"

LAYERS = (
    *("common", "gpu", "machine", "operators", "execution", "surface", "compiled"),
    *("stand_ins", "distributed"),
)
"""Each may import itself and those before it; modules beside the folders may import all."""

Import = tuple[str, str]
"""A module, and one that it imports."""


def module_of(path: Path) -> str:
    """Return a file's dotted name: ``pytest_gpumem.sizes``; a package's, for ``__init__.py``."""
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(FOLDER.rglob("*.py"))}


def imports_of(source: str) -> Iterator[str]:
    """Yield the modules of the package that ``source`` imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not read here"
            # from a.b import c: c is a module of the folder a.b, or a name of the module a.b.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == PACKAGE:
                yield name if name in MODULES else name.rpartition(".")[0]


@cache
def imports() -> set[Import]:
    """Return every import of one module of the package by another."""
    return {
        (module, imported)
        for module, path in MODULES.items()
        for imported in imports_of(path.read_text(encoding="utf-8"))
        if imported != module
    }


def height(module: str) -> int:
    """Return the position of a module's layer in ``simulated``, counted from below."""
    layer = module.removeprefix(f"{SIMULATED}.").partition(".")[0]
    return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)


def docstring_of(path: Path) -> str:
    """Return the docstring of a file, in one line."""
    return " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())


def test_every_folder_is_a_layer_whose_docstring_lists_those_below() -> None:
    simulated = (FOLDER / "simulated").iterdir()
    folders = {path.name for path in simulated if (path / "__init__.py").exists()}

    assert folders == set(LAYERS)
    for place, layer in enumerate(LAYERS):
        below = ", ".join(f"``{each}``" for each in LAYERS[:place])
        assert f"May use: {below or 'nothing'}" in docstring_of(MODULES[f"{SIMULATED}.{layer}"])


def test_imports_go_downward_only() -> None:
    inside = {pair for pair in imports() if all(name.startswith(f"{SIMULATED}.") for name in pair)}
    upward = {(one, other) for one, other in inside if height(other) > height(one)}

    assert upward == set()


def room(module: str) -> str | None:
    """Return the folder of the package that ``module`` lies in; ``None`` for one beside them."""
    _, first, *below = f"{module}.".split(".")
    return first if any(below) or (FOLDER / first).is_dir() else None


def test_no_two_rooms_import_each_other() -> None:
    between = {(room(one), room(other)) for one, other in imports()}
    pairs = {(one, other) for one, other in between if one and other and one != other}

    assert {pair for pair in pairs if pair[::-1] in pairs} == set()


@pytest.mark.parametrize("folder", ["allocator", "values"])
def test_a_room_that_is_usable_by_itself_imports_no_other(folder: str) -> None:
    assert {room(to) for one, to in imports() if room(one) == folder} - {None, folder} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: TopologicalSorter[str] = TopologicalSorter()
    for module, imported in imports():
        graph.add(module, imported)

    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}", pytrace=False)


@pytest.mark.parametrize(
    "source",
    [
        "from pytest_gpumem.simulated.gpu.device import parse_version",
        "from pytest_gpumem.simulated.gpu import device",
        "import pytest_gpumem.simulated.gpu.device",
        "def f():\n    from pytest_gpumem.simulated.gpu import device",
        "if TYPE_CHECKING:\n    from pytest_gpumem.simulated.gpu import device",
    ],
)
def test_an_import_is_found_in_every_position(source: str) -> None:
    assert list(imports_of(source)) == ["pytest_gpumem.simulated.gpu.device"]


def test_no_file_exceeds_the_maximum_length() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES.values()}
    long = {path for path, count in lines.items() if count > MOST_LINES}

    assert {path for path in long if REASON not in docstring_of(path)} == set()
