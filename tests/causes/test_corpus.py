"""A failure's first sentence is its cause: twenty-seven regressions of a small GPT project."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.causes import corpus
from tests.causes.regressions import REGRESSIONS
from tests.pytest_project import Project

LEAST_FOUND = 25
MOST_LINES = 25
"""The maximum length of a failure without ``-v``, which fits on a screen."""

pytestmark = pytest.mark.xdist_group("causes")


@pytest.fixture(scope="module")
def stored() -> dict[str, str]:
    """Hold the baselines of the unchanged project, by path; the first run fills them."""
    return {}


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, tuple[str, bool]]]:
    """Hold each regression's first sentence and whether it is the cause; print them at the end."""
    found: dict[str, tuple[str, bool]] = {}
    yield found
    corpus.show(found, sys.stderr)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_first_sentence_is_the_cause(
    project: Project,
    stored: dict[str, str],
    results: dict[str, tuple[str, bool]],
    name: str,
) -> None:
    regression = REGRESSIONS[name]
    corpus.accept(project, corpus.GPT, stored)
    corpus.regress(project, corpus.GPT, regression)

    lines = corpus.run(project, corpus.GPT, regression)

    sentence = corpus.first_sentence(lines)
    results[name] = sentence, bool(re.search(regression.sentence, sentence))
    failure = lines[lines.index(next(line for line in lines if line.startswith("___"))) :]
    length = next(i for i, line in enumerate(failure) if line.strip("= ") == "gpumem")
    traceback = any(line.startswith("E  ") for line in failure)  # torch's, of memory that ran out
    assert traceback or length <= MOST_LINES, failure[:length]


def test_at_least_twenty_five_causes_are_found(results: dict[str, tuple[str, bool]]) -> None:
    if len(results) < len(REGRESSIONS):
        pytest.skip("not all of the corpus ran in this process")
    missed = {name: sentence for name, (sentence, right) in results.items() if not right}
    assert len(results) - len(missed) >= LEAST_FOUND, missed
