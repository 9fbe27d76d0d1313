"""A test's numbers on the dry device are the same before and after other tests.

The corpus is that of ``tests/order``, without what compiles: that takes longer than all the rest.
Reversed, every test has other tests before it, and fixtures are set up by others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dry.conftest import Run, bare_environment
from tests.order.test_one_number import CORPUS, IN_FILE_ORDER, INI, REVERSING, Numbers, differing

LEFT_OUT = "test_compiled.py"

EXPLAINED_BESIDE_OTHERS = "test_outcomes.py::test_leaks"
"""Its body replaces, where it is run again to be explained, what it has leaked before: whose that
was is told apart only where earlier tests have left something, too."""

SITES = ("sites", "phases")
"""What explains a measurement."""


class Corpus:
    """A copy of the corpus, and what runs of it report."""

    def __init__(self, folder: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__", LEFT_OUT)
        shutil.copytree(CORPUS, folder / "corpus", ignore=ignored)
        self._folder = folder / "corpus"
        (self._folder / "pytest.ini").write_text(INI)
        (self._folder / "reversing.py").write_text(REVERSING)
        self.in_file_order = self.run(*IN_FILE_ORDER)

    def run(self, *arguments: str) -> Numbers:
        """Return the measurement of each test, by node id, but for what others had left."""
        report = self._folder / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        environment = bare_environment()
        environment["PYTHONPATH"] += f":{self._folder}"
        done = subprocess.run(
            [*command, "--gpumem-device=dry:A100-40GB", f"--gpumem-report=json:{report}"],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = {}
        for test in json.loads(report.read_text())["tests"]:
            measured = {**(test["measurement"] or {}), "outcome": test["outcome"]}
            left_out = SITES if test["nodeid"] == EXPLAINED_BESIDE_OTHERS else ()
            for field in ("stray", *left_out):
                measured.pop(field, None)
            found[test["nodeid"]] = measured
        return found


@pytest.fixture(scope="module")
def corpus(dry_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


def test_one_number_in_reverse_order(corpus: Corpus) -> None:
    found = corpus.run(*IN_FILE_ORDER, "-p", "reversing")

    assert len(corpus.in_file_order) >= 120
    assert found.keys() == corpus.in_file_order.keys()
    assert differing(corpus.in_file_order, found) == {}
