"""The whole terminal output of pytest in two repositories, as a person has reviewed it.

The expected output is in ``terminal/``. To write it again after a change, and review it:

    GPUMEM_WRITE_TERMINAL=1 python -m pytest tests/integration/test_terminal_output.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.trial_projects import LARGE, SMALL, write
from tests.pytest_project import Project

SHOWN = Path(__file__).parent / "terminal"
WRITE = "GPUMEM_WRITE_TERMINAL"

RELEASE = ".".join(torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(
    len(RELEASE) != len("2.13"), reason="lines break elsewhere where a release's name is shorter"
)


WIDTHS = (80, 200)

TELLS_AGAIN = """
    import os, pickle
    from pathlib import Path

    KEPT = Path(os.environ["KEPT_REPORTS"])
    TOLD = pickle.loads(KEPT.read_bytes()) if KEPT.exists() else None
    reports = {}

    def pytest_runtest_logreport(report):
        reports.setdefault(report.nodeid, []).append(pickle.dumps(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item):
        if TOLD is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in map(pickle.loads, TOLD[item.nodeid]):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish():
        KEPT.write_bytes(pickle.dumps(reports))
"""
"""A conftest for the second width, which replays the reports of the first run."""


def test_a_repository_of_40_tests(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, SMALL)
    project.write(conftest=TELLS_AGAIN)
    run(project, monkeypatch, 80, "small-recorded", "--gpumem-update-baselines")
    for width in WIDTHS:
        run(project, monkeypatch, width, "small-clean")
    monkeypatch.setenv("REGRESSION", "1")
    for width in WIDTHS:
        run(project, monkeypatch, width, "small-one", "tests/test_training.py::test_step[1024-2]")
        run(project, monkeypatch, width, "small-regressed")


def test_a_repository_of_300_tests(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, LARGE)
    project.write(conftest=TELLS_AGAIN)
    run(project, monkeypatch, 80, "large-recorded", "--gpumem-update-baselines")
    for width in WIDTHS:
        run(project, monkeypatch, width, "large-clean")
    monkeypatch.setenv("REGRESSION", "1")
    for width in WIDTHS:
        regressed = run(project, monkeypatch, width, "large-regressed")
        regressed.assert_outcomes(passed=224, failed=76)
        assert len(regressed.outlines) <= 60


def run(
    project: Project, monkeypatch: pytest.MonkeyPatch, width: int, name: str, *args: str
) -> pytest.RunResult:
    """Run pytest on a terminal of ``width`` columns, and check what it writes."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("KEPT_REPORTS", str(project.path.parent / f"{name}.pickle"))
    result = project.run(*args, device="", use=("cacheprovider",))
    check(f"{name}-{width}", result)
    return result


def check(name: str, result: pytest.RunResult) -> None:
    """Compare a run's output with the expected file ``name``, or write that file."""
    text = "\n".join(shown(result.outlines)) + "\n"
    path = SHOWN / f"{name}.txt"
    if os.environ.get(WRITE):
        SHOWN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} is out of date: {WRITE}=1"


def shown(lines: list[str]) -> Iterator[str]:
    """Yield ``lines`` with placeholders for parts that differ by machine and release."""
    for line in lines:
        if re.match(r"platform |rootdir: |configfile: |testpaths: |plugins: |cachedir: ", line):
            continue
        line = re.sub(r"torch \d+\.\d+\.[^;\s]+", "torch X.YY.Z", line)
        line = re.sub(rf"torch ?{re.escape(RELEASE)}", lambda found: found[0][:-4] + "X.YY", line)
        yield re.sub(r"^=+ (.*) in [\d.]+s.* =+$", r"= \1 =", line).rstrip()
