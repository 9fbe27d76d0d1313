"""Error output of a process that makes predictions."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from pytest_gpumem.prediction.process import last_words

HEADING = "==================================== ERRORS ===================================="
REASON = "E   ModuleNotFoundError: No module named 'foo'"


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        (f"{HEADING}\n{REASON}\nERROR test_a.py", "", REASON),
        ("collected 0 items\n== no tests ran in 0.01s ==\n", "", "no tests ran in 0.01s"),
        ("", "ERROR: not found: test_a.py\n", "ERROR: not found: test_a.py"),
        (
            "",
            "ERROR: usage: pytest [options]\npytest: error: unrecognized arguments: --nope\n",
            "pytest: error: unrecognized arguments: --nope",
        ),
        ("=====\n", "", "pytest ended with code 4"),
    ],
)
def test_last_words_are_the_first_error(stdout: str, stderr: str, words: str) -> None:
    assert last_words(CompletedProcess([], 4, stdout, stderr)) == words
