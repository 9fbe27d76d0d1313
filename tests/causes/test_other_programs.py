"""Causes are found in programs other than the one they were developed on."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.causes import corpus
from tests.causes.more_regressions import ELSEWHERE, HARMLESS, PROGRAMS, SIGNATURES
from tests.pytest_project import Project

pytestmark = pytest.mark.xdist_group("causes")

Told = dict[str, tuple[str, bool]]


@pytest.fixture(scope="module")
def stored() -> defaultdict[str, dict[str, str]]:
    """Hold the baselines of each program, by path; its first run fills them."""
    return defaultdict(dict)


@pytest.fixture(scope="module")
def results() -> Iterator[Told]:
    """Hold each change's first sentence and whether it is right; print them at the end."""
    found: Told = {}
    yield found
    corpus.show(found, sys.stderr)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_first_sentence_is_the_cause(
    project: Project, stored: dict[str, dict[str, str]], results: Told, name: str
) -> None:
    case = ELSEWHERE[name]
    sentence = corpus.sentence_of(
        project, PROGRAMS[case.program], stored[case.program], case.planted
    )
    results[name] = sentence, bool(re.search(case.planted.sentence, sentence))
    assert results[name][1], sentence


@pytest.mark.parametrize("name", HARMLESS)
def test_a_decoy_is_not_named(
    project: Project, stored: dict[str, dict[str, str]], results: Told, name: str
) -> None:
    case = HARMLESS[name]
    sentence = corpus.sentence_of(
        project, PROGRAMS[case.program], stored[case.program], case.planted
    )
    named = [cause for cause, words in SIGNATURES.items() if re.search(words, sentence)]
    right = set(named) <= set(case.allowed)
    results[name] = (
        sentence,
        right and (bool(named) or bool(re.search(case.planted.sentence, sentence))),
    )
    assert results[name][1], sentence
