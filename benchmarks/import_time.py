"""What the plugin costs every pytest run, beside other plugins that are installed.

Collects a suite that uses no plugin and counts the plugin's own modules: what else a plugin pulls
in that is not part of it (torch, numpy, the standard library) is what other projects pay for as
well. Exits with 1 where the plugin takes longer than its budget.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from os import environ
from pathlib import Path

BUDGET_MS = 8.0
RUNS = 9

REPOSITORY = Path(__file__).parent.parent

_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)")


@dataclass(frozen=True)
class Plugin:
    """A pytest plugin: its name, the module pytest loads, and its packages."""

    name: str
    module: str
    packages: tuple[str, ...]


OURS = Plugin("pytest-gpumem", "pytest_gpumem.plugin", ("pytest_gpumem",))
OTHERS = (
    Plugin("pytest-benchmark", "pytest_benchmark.plugin", ("pytest_benchmark",)),
    Plugin("syrupy", "syrupy", ("syrupy",)),
    Plugin("pytest-xdist", "xdist.plugin", ("xdist",)),
    Plugin("pytest-cov", "pytest_cov.plugin", ("pytest_cov",)),
    Plugin("pytest-memray", "pytest_memray", ("pytest_memray",)),
)


def own_milliseconds(plugin: Plugin, folder: Path) -> float:
    """Return the time that importing the plugin's own modules takes, compiled before.

    The shortest of each module, because what else the machine does only ever makes it longer.
    ``folder`` holds the suite.
    """
    runs = [_import_once(plugin, folder) for _ in range(RUNS + 1)]
    return sum(min(run[module] for run in runs) for module in runs[0]) / 1000


def _import_once(plugin: Plugin, folder: Path) -> dict[str, int]:
    """Return microseconds by module."""
    environment = {
        **environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": str(REPOSITORY),
    }
    arguments = ["--collect-only", "-p", plugin.module]
    # Collecting garbage takes milliseconds, and strikes whichever module is imported just then.
    # What pytest itself imports by name has no line; so the plugin is imported before.
    code = (
        f"import gc, pytest; gc.disable(); import {plugin.module};"
        f" raise SystemExit(pytest.main({arguments}))"
    )
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = _LINE.findall(result.stderr)
    return {name: int(time) for time, name in lines if name.split(".")[0] in plugin.packages}


def main() -> int:
    """Print the table; return 1 where the plugin is over its budget."""
    print(f"{'plugin':<18}{'own import, ms':>16}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_plain.py").write_text("def test_plain():\n    pass\n")
        ours = own_milliseconds(OURS, folder)
        print(f"{OURS.name:<18}{ours:>16.1f}")
        for plugin in OTHERS:
            installed = find_spec(plugin.packages[0]) is not None
            shown = f"{own_milliseconds(plugin, folder):.1f}" if installed else "not installed"
            print(f"{plugin.name:<18}{shown:>16}")
    kept = ours < BUDGET_MS
    print(f"budget of {OURS.name}: {BUDGET_MS:.0f} ms, {'kept' if kept else 'exceeded'}")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
