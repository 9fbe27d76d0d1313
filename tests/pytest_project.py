"""Runs pytest in pytest, with this plugin, on a simulated GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch  # noqa: F401  # before pytester forgets what a run imports: numpy loads only once

from pytest_gpumem.baseline import collected
from tests.forked import quick, quicken_workers

DEVICE = "--gpumem-device=sim:T4"

PYTEST = "import pytest; raise SystemExit(pytest.main())"

PLUGINS_OF_SOME_TESTS = (
    "benchmark",
    "anyio",
    "asyncio",
    "platformdirs",
    "randomly",
    "rerunfailures",
    "subtests",
    "cacheprovider",
    "hypothesispytest",
    "logging",
    "xdist.looponfail",
)

_TERMINAL = """
    import os, pty, sys

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="200")
        os.execv(sys.argv[1], [sys.argv[1], "-m", "pytest", *sys.argv[2:]])
    shown = b""
    try:
        while chunk := os.read(terminal, 1024):
            shown += chunk
    except OSError:  # the process has closed it
        pass
    os.waitpid(pid, 0)
    sys.stdout.buffer.write(shown)
"""

_INSTALLED = any(entry.name == "gpumem" for entry in entry_points(group="pytest11"))

LOADED: tuple[str, ...] = () if _INSTALLED else ("-p", "pytest_gpumem.plugin")
"""Arguments that load the plugin where it is not installed."""

UNLOADED = ("-p", "no:gpumem") if _INSTALLED else ()


_IMPORTS = "import pytest\nimport torch\n\n"


class Project:
    """A user's project: files, and pytest runs on them."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        self._apart = 0
        quicken_workers()
        self.path: Path = pytester.path

    def write(self, **files: str) -> None:
        """Write Python files; each starts with the imports that tests need."""
        self._pytester.makepyfile(
            **{name: _IMPORTS + _dedented(source) for name, source in files.items()}
        )

    def write_in(self, folder: str, name: str, source: str) -> Path:
        """Write a Python file of any name into ``folder``, with the same imports."""
        path = self.path / folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_IMPORTS + _dedented(source))
        return path

    def write_ini(self, text: str) -> None:
        self._pytester.makeini("[pytest]\n" + _dedented(text))

    def run(
        self,
        *args: str,
        device: str = DEVICE,
        use: tuple[str, ...] = (),
        plugins: Sequence[object] = (),
    ) -> pytest.RunResult:
        """Run pytest in this process; ``use`` enables plugins by name, ``plugins`` adds objects."""
        arguments = _arguments(args, device, use)
        collected._functions_in.cache_clear()  # of the previous run's files
        return self._pytester.runpytest_inprocess(*arguments, plugins=plugins)

    def run_apart(
        self, *args: str, device: str = DEVICE, use: tuple[str, ...] = ()
    ) -> pytest.RunResult:
        """Run pytest in a process of its own, which has torch already."""
        self._apart += 1
        base = self._pytester.mkdir(f"runpytest-{self._apart}")
        arguments = (f"--basetemp={base}", *_arguments(args, device, use))
        return self._pytester.run(quick(), "-c", PYTEST, *arguments)

    def run_anew(self, *args: str, device: str = DEVICE) -> pytest.RunResult:
        """Run pytest in a new Python, which has imported nothing."""
        return self._pytester.runpytest_subprocess(*_arguments(args, device, ()))

    def start(self, *args: str, device: str = DEVICE) -> subprocess.Popen[bytes]:
        """Start pytest in a process of its own, and do not wait for it."""
        command = [str(quick()), "-m", "pytest", *_arguments(args, device, ())]
        return subprocess.Popen(command, cwd=self.path, stdout=subprocess.PIPE)

    def run_on_terminal(self, *args: str, device: str = DEVICE) -> str:
        """Run pytest in a process of its own, on a terminal; return what it wrote there."""
        self._pytester.makepyfile(on_terminal=_TERMINAL)
        script = self.path / "on_terminal.py"
        arguments = _arguments(args, device, ("logging",))
        written = self._pytester.run(sys.executable, script, quick(), *arguments)
        return written.stdout.str()

    def run_without_plugin(self, *args: str) -> pytest.RunResult:
        """Run pytest as if the plugin were not installed."""
        return self._pytester.run(quick(), "-c", PYTEST, *UNLOADED, *args)

    def report(self, *args: str, apart: bool = False, **options: Any) -> dict[str, Any]:
        """Run pytest and return the JSON report's tests by node id."""
        run = self.run_apart if apart else self.run
        run(f"--gpumem-report=json:{self.path / 'report.json'}", *args, **options)
        return self.written_report()

    def written_report(self) -> dict[str, Any]:
        data = json.loads((self.path / "report.json").read_text())
        # A test's environment stands in the report only where it is not the most common one.
        common = {"environment": data["environment"]}
        for test in data["tests"]:
            _check_sums(test["measurement"])
        return {test["nodeid"]: {**common, **test} for test in data["tests"]}

    def baselines(self) -> dict[str, Mapping[str, Any]]:
        """Return all stored baselines, by environment and module."""
        folder = self.path / "baselines"
        return {
            path.relative_to(folder).as_posix(): json.loads(path.read_text())["tests"]
            for path in sorted(folder.rglob("*.json"))
        }


def _check_sums(measurement: Mapping[str, Any] | None) -> None:
    """Check, in the report of every project, that categories and sites sum to the peak."""
    if measurement is None:
        return
    composed = [(name, p) for name, p in measurement["phases"].items() if name != "setup"]
    for name, peak in (("the test", measurement), *composed):
        assert sum(peak["composition"].values()) == peak["peak_allocated"], name
        assert sum(site["bytes"] for site in peak["sites"]) == peak["peak_allocated"], name


def _arguments(args: tuple[str, ...], device: str, use: tuple[str, ...]) -> list[str]:
    unused = [name for name in PLUGINS_OF_SOME_TESTS if name not in use]
    off = [arg for name in unused for arg in ("-p", f"no:{name}")]
    return [*LOADED, *off, *([device] if device else []), *args]


def _dedented(source: str) -> str:
    return dedent(source).strip("\n") + "\n"
