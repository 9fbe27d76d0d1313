"""Runs of regressions: a program with its baselines, and the same program with a change."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from tests.causes.project import FILES, NORMALIZE
from tests.causes.regressions import Regression
from tests.pytest_project import Project

SITE = "lib/site-packages"
DEVICE = "--gpumem-device=sim:A100-40GB"


@dataclass(frozen=True)
class Program:
    """A program's files by name; the last one has its tests."""

    files: Mapping[str, str]
    library: str = ""
    """The module of a library that it uses as if it were installed."""
    source: str = ""

    @property
    def tests(self) -> str:
        """Return the name of the file with its tests."""
        return f"{list(self.files)[-1]}.py"


GPT = Program(FILES, "normalize", NORMALIZE)


def sentence_of(
    project: Project, program: Program, stored: dict[str, str], regression: Regression
) -> str:
    """Return the first sentence of the failure of ``regression``."""
    accept(project, program, stored)
    regress(project, program, regression)
    return first_sentence(run(project, program, regression))


def show(results: Mapping[str, tuple[str, bool]], stream: TextIO) -> None:
    """Print a table of first sentences, with a mark for each that names the cause."""
    width = max(map(len, results), default=0)
    for name, (sentence, right) in results.items():
        print(f"{'ok  ' if right else 'MISS'}  {name:<{width}}  {sentence}", file=stream)
    found = sum(right for _, right in results.values())
    print(f"{found} of {len(results)} first sentences are the cause", file=stream)


def accept(project: Project, program: Program, stored: dict[str, str]) -> None:
    """Write the unchanged program with its baselines; run it first if there are none."""
    _write(project, program)
    if not stored:
        result = project.run_apart("--gpumem-update-baselines", device=DEVICE)
        assert result.ret == 0, result.outlines
        folder = project.path / "baselines"
        stored.update(
            {str(p.relative_to(project.path)): p.read_text() for p in folder.rglob("*.json")}
        )
    for name, text in stored.items():
        path = project.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def regress(project: Project, program: Program, regression: Regression) -> None:
    """Plant the regression."""
    files = {**program.files, program.library: program.source}
    for edit in regression.edits:
        source = files[edit.file]
        assert source.count(edit.old) == 1, (edit.file, edit.old, source.count(edit.old))
        files[edit.file] = source.replace(edit.old, edit.new)
    library = files.pop(program.library)
    _write(
        project, replace(program, files=files, source=library), changed=library != program.source
    )


def _write(project: Project, program: Program, *, changed: bool = False) -> None:
    # Python takes bytecode of a file with the same size and second for current.
    for compiled in project.path.rglob("__pycache__"):
        shutil.rmtree(compiled)
    project.write(**program.files)
    project.write_ini(f"pythonpath = . {SITE}")
    if program.library:
        _install(project, program.library, program.source, "2.0" if changed else "1.0")


def _install(project: Project, name: str, source: str, release: str) -> None:
    library = project.path / SITE
    project.write_in(SITE, name, source)
    for old in library.glob("*.dist-info"):
        shutil.rmtree(old)
    info = library / f"{name}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    (info / "top_level.txt").write_text(f"{name}\n")


def run(project: Project, program: Program, regression: Regression, *options: str) -> list[str]:
    """Run the test that fails; return what the terminal shows."""
    kept = {name: os.environ.get(name) for name, _ in regression.environment}
    os.environ.update(dict(regression.environment))
    try:
        result = project.run_apart(
            f"{program.tests}::{regression.test}",
            f"--gpumem-report=json:{project.path / 'report.json'}",
            *regression.options,
            *options,
            device=DEVICE,
        )
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    assert result.ret == 1, result.outlines
    lines: list[str] = result.outlines
    return lines


def first_sentence(lines: list[str]) -> str:
    """Return the first sentence of a failure, after its heading or torch's traceback."""
    behind = next(
        (i for i, line in enumerate(lines) if line.strip("- ") == "gpumem" and line[0] == "-"), None
    )
    heading = next(i for i, line in enumerate(lines) if line.startswith("___"))
    raised = any(line.startswith("E  ") for line in lines)
    rest = lines[(behind if raised and behind is not None else heading) + 1 :]
    wrapped = itertools.takewhile(lambda line: line.startswith("    "), rest[1:])
    return " ".join([rest[0], *map(str.strip, wrapped)])
