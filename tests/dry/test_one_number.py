"""A test's numbers on the dry device are the same before and after other tests.

The corpus is that of ``tests/order``. After a run in file order, which finds an empty cache of
compiled code, one other mode is run, which finds a full one: another mode each day, all of them
with ``thorough``.
"""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from tests.dry.conftest import Run, bare_environment
from tests.order.test_one_number import CORPUS, IN_FILE_ORDER, INI, REVERSING, Numbers, differing

COMPILED = "test_compiled.py"

SHUFFLING = """
import random

def pytest_collection_modifyitems(items):
    random.Random({seed}).shuffle(items)
"""

STAYS = "test_fixtures.py::test_asked_for_in_the_body"
"""A test whose fixture stays where it is if an earlier test has set it up (docs/dry.md)."""

TODAY = datetime.date.today().toordinal()

MODES = {
    "reversed": ("-p", "reversing"),
    "two workers": ("-n2",),
    "shuffled": ("-p", "shuffling"),
}


class Corpus:
    """A copy of the corpus, and what runs of it report."""

    def __init__(self, folder: Path) -> None:
        left_out = () if find_spec("triton") else (COMPILED,)
        ignored = shutil.ignore_patterns("__pycache__", *left_out)
        shutil.copytree(CORPUS, folder / "corpus", ignore=ignored)
        self._folder = folder / "corpus"
        (self._folder / "pytest.ini").write_text(INI)
        (self._folder / "reversing.py").write_text(REVERSING)
        (self._folder / "shuffling.py").write_text(SHUFFLING.format(seed=TODAY))
        self.in_file_order = self.run()

    def run(self, *arguments: str) -> Numbers:
        """Return the measurement of each test, by node id, but for what others had left."""
        report = self._folder / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *IN_FILE_ORDER]
        environment = bare_environment()
        environment["PYTHONPATH"] += f":{self._folder}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder.parent / "inductor")
        done = subprocess.run(
            [
                *command,
                *arguments,
                "--gpumem-device=dry:A100-40GB",
                f"--gpumem-report=json:{report}",
            ],
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
            measured.pop("stray", None)
            found[test["nodeid"]] = measured
        del found[STAYS]
        return found


@pytest.fixture(scope="module")
def corpus(dry_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("mode", MODES)
def test_one_number_in_every_mode(corpus: Corpus, mode: str) -> None:
    of_the_day = list(MODES)[TODAY % len(MODES)]
    if mode != of_the_day and hypothesis.settings().max_examples < 500:
        pytest.skip(f"today the mode is {of_the_day}; --hypothesis-profile thorough runs all")
    found = corpus.run(*MODES[mode])

    assert len(corpus.in_file_order) >= 120
    assert found.keys() == corpus.in_file_order.keys()
    assert differing(corpus.in_file_order, found) == {}, f"shuffled by the seed {TODAY}"
