"""Draw ``docs/pictures/failure.svg``: a failing test, as a terminal shows it.

``python docs/make_picture.py`` makes the project of ``docs/regression.md`` from its blocks, stores
a baseline, applies the change that is shown there, and draws what pytest prints then. A test does
the same and compares the words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

DOCS = Path(__file__).parent
PICTURE = DOCS / "pictures" / "failure.svg"
PAGE = DOCS / "regression.md"
COLUMNS = 100
_PYTEST = "import sys, pytest; sys.exit(pytest.main())"
"""As the command ``pytest`` of this Python; ``-m pytest`` would be named in what it suggests."""


def failure() -> list[str]:
    """Return what pytest prints of the failure, with its colours, a line each."""
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, source in re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.M | re.S):
            (folder / name).write_text(f"# {name}\n{source}", encoding="utf-8")
        (folder / "pytest.ini").write_text("[pytest]\ngpumem_device = sim\n", encoding="utf-8")
        _pytest(folder, "--gpumem-update-baselines")
        changed = folder / "attention.py"
        source = _changed(changed.read_text(encoding="utf-8"), page)
        changed.write_text(source, encoding="utf-8")
        lines = _pytest(folder, "--color=yes")
    begin = next(number for number, line in enumerate(lines) if " FAILURES " in line)
    return lines[begin:-1]  # the last one says how long it took


def _changed(source: str, page: str) -> str:
    """Return ``source`` after the page's diff, whose lines lie next to each other."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    if old not in source:
        raise ValueError(f"{PAGE} shows no such lines: {old}")
    return source.replace(old, new)


def _pytest(folder: Path, *options: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "PYTEST_ADDOPTS", "COLUMNS"):
        kept.pop(name, None)
    # Other plugins of this environment have no part in the picture.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", _PYTEST, *options],
        cwd=folder,
        env={
            **kept,
            **alone,
            "COLUMNS": str(COLUMNS),
            "PYTEST_PLUGINS": "pytest_gpumem.plugin",
            "PYTHONPATH": os.pathsep.join([str(DOCS.parent), str(folder)]),
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return ran.stdout.splitlines()


def without_colours(line: str) -> str:
    """Return what a person reads of ``line``."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def drawn(lines: list[str]) -> str:
    """Return an SVG of ``lines`` that asks the network for nothing."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=StringIO())
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    svg = console.export_svg(title="pytest", unique_id="failure")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)


if __name__ == "__main__":
    PICTURE.write_text(drawn(failure()), encoding="utf-8")
