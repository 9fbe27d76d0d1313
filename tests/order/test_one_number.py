"""A test's measurement is the same alone, in any order and under any option of :data:`MODES`.

The corpus is a project of some 140 measured tests. Each measurement is compared as a whole with
that of a run in file order: peaks, phases, leaks, categories, source lines and notes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.forked import quick

CORPUS = Path(__file__).parent / "corpus"

INI = """
[pytest]
filterwarnings = ignore
"""

REVERSING = "def pytest_collection_modifyitems(items):\n    items.reverse()\n"

RUN_TWICE = """
import sys, pytest
first, second = sys.argv[1:3]
for report in (first, second):
    pytest.main([*sys.argv[3:], f"--gpumem-report=json:{report}"])
"""

ALWAYS = ("-p", "no:cacheprovider", "--gpumem-device=sim:A100-40GB")
IN_FILE_ORDER = ("-p", "no:randomly")

MODES = {
    "reversed": ("-p", "no:randomly", "-p", "reversing"),
    **{f"seed {seed}": ("-p", "randomly", f"--randomly-seed={seed}") for seed in (1, 2, 3)},
    "two workers": (*IN_FILE_ORDER, "-n2"),
    "worksteal": (*IN_FILE_ORDER, "-n2", "--dist=worksteal"),
    "session scope": (*IN_FILE_ORDER, "--gpumem-sim-scope=session"),
    "all": (*IN_FILE_ORDER, "--gpumem-all"),
    "share": (*IN_FILE_ORDER, "-n2", "--gpumem-share"),
    "explained": (*IN_FILE_ORDER, "--gpumem-explain=always"),
}
"""Options of pytest by mode; coverage, two runs in a process and single tests have own tests."""

ALONE = 10
"""Number of tests that are run alone, drawn anew each time; all of them with ``thorough``."""

NOT_ITS_OWN = "stray"
"""The field of a measurement that counts bytes that earlier tests left: it may differ."""

Numbers = Mapping[str, Any]


class Corpus:
    """A copy of the corpus, with the reports of its runs."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(CORPUS, folder / "corpus", ignore=shutil.ignore_patterns("__pycache__"))
        self._folder = folder / "corpus"
        (self._folder / "pytest.ini").write_text(INI)
        (self._folder / "reversing.py").write_text(REVERSING)
        self._runs = 0
        self.in_file_order = self.run(*IN_FILE_ORDER)

    def run(self, *arguments: str, runner: tuple[str, ...] = ("-m", "pytest")) -> Numbers:
        """Return the measurement of each test, by node id."""
        report = self._new_report()
        self._call(*runner, *arguments, f"--gpumem-report=json:{report}")
        return _numbers(report)

    def run_twice(self) -> tuple[Numbers, Numbers]:
        """Return the measurements of two runs in one process."""
        reports = self._new_report(), self._new_report()
        self._call("-c", RUN_TWICE, *map(str, reports), *IN_FILE_ORDER)
        return _numbers(reports[0]), _numbers(reports[1])

    def _new_report(self) -> Path:
        self._runs += 1
        return self._folder.parent / f"{self._runs}.json"

    def _call(self, *arguments: str) -> None:
        # A new process: no test has run and no compiler is imported in it.
        ran = subprocess.run(
            [str(quick("plain")), *arguments, *ALWAYS],
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(_paths(self._folder)),
                # The first run compiles; the others read its cache.
                "TORCHINDUCTOR_CACHE_DIR": str(self._folder.parent / "inductor"),
            },
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def _paths(folder: Path) -> Iterator[str]:
    yield str(folder)
    yield str(CORPUS.parents[2])


def _numbers(report: Path) -> Numbers:
    tests = json.loads(report.read_text())["tests"]
    return {
        test["nodeid"]: {
            "outcome": test["outcome"],
            **{k: v for k, v in (test["measurement"] or {}).items() if k != NOT_ITS_OWN},
        }
        for test in tests
    }


def differing(expected: Numbers, found: Numbers) -> dict[str, dict[str, Any]]:
    """Return the fields that differ, by test, with both values."""
    return {
        nodeid: {
            field: (expected[nodeid].get(field), numbers.get(field))
            for field in {**expected[nodeid], **numbers}
            if expected[nodeid].get(field) != numbers.get(field)
        }
        for nodeid, numbers in found.items()
        if nodeid in expected and expected[nodeid] != numbers
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


def test_the_tests_of_the_corpus_are_measured(corpus: Corpus) -> None:
    assert len(corpus.in_file_order) >= 120
    peaks = [numbers["peak_allocated"] for numbers in corpus.in_file_order.values()]
    assert peaks.count(0) == 1  # the test whose first allocation runs out of memory
    assert len(set(peaks)) > 80


@pytest.mark.parametrize("mode", MODES)
def test_measurements_do_not_depend_on_the_mode(corpus: Corpus, mode: str) -> None:
    found = corpus.run(*MODES[mode])
    assert found.keys() >= corpus.in_file_order.keys()
    assert differing(corpus.in_file_order, found) == {}


def test_measurements_do_not_depend_on_coverage(corpus: Corpus) -> None:
    found = corpus.run(*IN_FILE_ORDER, runner=("-m", "coverage", "run", "-m", "pytest"))
    assert found.keys() == corpus.in_file_order.keys()
    assert differing(corpus.in_file_order, found) == {}


def test_measurements_are_the_same_twice_in_a_process(corpus: Corpus) -> None:
    first, second = corpus.run_twice()
    assert first.keys() == second.keys() == corpus.in_file_order.keys()
    assert differing(corpus.in_file_order, first) == {}
    assert differing(corpus.in_file_order, second) == {}


def test_the_measurement_of_a_test_alone_is_the_same(corpus: Corpus) -> None:
    chosen = list(corpus.in_file_order)
    if hypothesis.settings().max_examples < 500:
        chosen = random.sample(chosen, ALONE)
    found = {nodeid: corpus.run(nodeid)[nodeid] for nodeid in chosen}
    assert differing(corpus.in_file_order, found) == {}
