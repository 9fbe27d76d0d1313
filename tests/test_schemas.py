"""A schema that is compiled to functions refuses exactly what jsonschema refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pytest_gpumem.jsonfile import Acceptors, schema_problem

BASELINE: Any = {
    "schema_version": 1,
    "environment": {"simulated": True, "gpu": "T4", "compute_capability": "7.5", "torch": "2.13"},
    "tests": {
        "test_a": {
            "peak_allocated": 4096,
            "peak_reserved": 8192,
            "allocated_after": -512,
            "cublas_workspace": 0,
            "phases": {"forward": {"peak_allocated": 4096, "composition": {"inputs": 1}}},
            "composition": {"activations": 4096},
            "sites": [{"category": "activations", "bytes": 4096, "shape": [32, 32]}],
        }
    },
}
REPORT: Any = {
    "schema_version": 1,
    "environment": None,
    "tests": [
        {
            "nodeid": "t.py::test",
            "outcome": "passed",
            "environment": BASELINE["environment"],
            "measurement": None,
            "expectation": {"max": 1},
            "baseline": {"peak_allocated": 1},
            "prediction": None,
            "verdicts": [],
            "nvml": {},
        }
    ],
}
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.0,
    1.5,
    2**60,
    2**60 + 1,
    1e300,
    "",
    "x",
    [],
    {},
    [[]],
)


def schema_of(package: str) -> Any:
    return json.loads(files(package).joinpath("schema.json").read_text(encoding="utf-8"))


def paths_within(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_within(item, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("package", "document"),
    [("pytest_gpumem.baseline", BASELINE), ("pytest_gpumem.report", REPORT)],
)
def test_the_same_values_are_refused_as_by_jsonschema(package: str, document: Any) -> None:
    schema = schema_of(package)
    accepts, reference = Acceptors(schema).of(schema), Draft202012Validator(schema)
    assert accepts(document)
    generator = random.Random(0)
    for path in paths_within(document):
        for value in WRONG_VALUES:
            changed = with_value(document, path, value)
            # Sometimes a second change: one fault must not hide another.
            if generator.random() < 0.2:
                second = generator.choice([*paths_within(changed)])
                changed = with_value(changed, second, generator.choice(WRONG_VALUES))
            is_valid = reference.is_valid(changed)
            assert (schema_problem(package, changed) is None) == is_valid, (path, value)
            assert is_valid or not accepts(changed), (path, value)


def test_a_missing_or_unknown_name_is_refused_at_any_depth() -> None:
    package = "pytest_gpumem.baseline"
    for path in paths_within(BASELINE):
        for name in ("peak_allocated", "category", "gpu", "tests"):
            place = BASELINE
            for key in path:
                place = place[key]
            if isinstance(place, dict) and name in place:
                less = {key: value for key, value in place.items() if key != name}
                assert schema_problem(package, with_value(BASELINE, path, less)) is not None
                more = {**place, "unheard of": 1}
                assert schema_problem(package, with_value(BASELINE, path, more)) is not None


def test_an_unknown_keyword_of_a_schema_raises_an_error() -> None:
    with pytest.raises(NotImplementedError, match="uniqueItems"):
        Acceptors({}).of({"type": "array", "uniqueItems": True})


def test_the_one_wrong_value_of_many_is_named() -> None:
    tests = {f"test_{n}": {**BASELINE["tests"]["test_a"]} for n in range(1000)}
    wrong = with_value({**BASELINE, "tests": tests}, ("tests", "test_999", "peak_reserved"), -1)
    problem = schema_problem("pytest_gpumem.baseline", wrong)
    assert problem == "-1 is less than the minimum of 0 at $.tests.test_999.peak_reserved"


def test_a_wrong_value_within_any_of_is_named() -> None:
    report = with_value(REPORT, ("tests", 0, "baseline"), {"peak_allocated": "1 GiB"})
    problem = schema_problem("pytest_gpumem.report", report)
    assert problem == "'1 GiB' is not of type 'integer' at $.tests[0].baseline.peak_allocated"


def test_control_characters_in_a_name_are_escaped() -> None:
    tests = {"test_\x1b[31m\n": 1}
    problem = schema_problem("pytest_gpumem.baseline", {**BASELINE, "tests": tests})
    assert problem is not None
    assert r"\x1b[31m\n" in problem
    assert problem.isprintable()
