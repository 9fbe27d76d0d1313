"""Runs the project's regressions: the project with its baselines, and each with what changed."""

from __future__ import annotations

import itertools
import os

from tests.causes.project import FILES, NORMALIZE
from tests.causes.regressions import Regression
from tests.pytest_project import Project

SITE = "lib/site-packages"
DEVICE = "--gpumem-device=sim:A100-40GB"


def write(project: Project, files: dict[str, str], normalize: str, release: str) -> None:
    """Write the project, and the library that it uses as if it were installed."""
    project.write(**files)
    project.write_ini(f"pythonpath = . {SITE}")
    library = project.path / SITE
    project.write_in(SITE, "normalize", normalize)
    for old in library.glob("*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = library / f"normalize-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: normalize\nVersion: {release}\n")
    (info / "RECORD").write_text("normalize.py,,\n")
    (info / "top_level.txt").write_text("normalize\n")


def accept(project: Project, stored: dict[str, str]) -> None:
    """Write the project as it was, with its baselines."""
    write(project, FILES, NORMALIZE, "1.0")
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


def regress(project: Project, regression: Regression) -> None:
    """Plant the regression."""
    files = {**FILES, "normalize": NORMALIZE}
    for edit in regression.edits:
        source = files[edit.file]
        assert source.count(edit.old) == 1, (edit.file, edit.old, source.count(edit.old))
        files[edit.file] = source.replace(edit.old, edit.new)
    normalize = files.pop("normalize")
    write(project, files, normalize, "1.0" if normalize == NORMALIZE else "2.0")


def run(project: Project, regression: Regression, *options: str) -> list[str]:
    """Run the test that fails; return what the terminal shows."""
    kept = {name: os.environ.get(name) for name, _ in regression.environment}
    os.environ.update(dict(regression.environment))
    try:
        result = project.run_apart(
            f"test_gpt.py::{regression.test}",
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
    """Return the first sentence of a failure: behind its heading, or behind torch's traceback."""
    behind = next(
        (i for i, line in enumerate(lines) if line.strip("- ") == "gpumem" and line[0] == "-"), None
    )
    heading = next(i for i, line in enumerate(lines) if line.startswith("___"))
    raised = any(line.startswith("E  ") for line in lines)
    rest = lines[(behind if raised and behind is not None else heading) + 1 :]
    wrapped = itertools.takewhile(lambda line: line.startswith("    "), rest[1:])
    return " ".join([rest[0], *map(str.strip, wrapped)])
