"""Stored entries that no test uses, and the probable successor of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.baseline.collected import Collected, MeasuredTest, unused_baselines
from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from tests.stores import BaselineStore

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
L4 = Environment(simulated=True, gpu="L4", compute_capability="8.9", torch="2.13")
MIB = 1024**2


def measured(nodeid: str, peak: int, environment: Environment = T4) -> MeasuredTest:
    measurement = Measurement(
        device="cuda:0",
        simulated=True,
        peak_allocated=peak,
        peak_reserved=2 * MIB,
        allocated_before=0,
        allocated_after=0,
        leaked=0,
        cublas_workspace=0,
        phases={},
    )
    return MeasuredTest(nodeid, environment, measurement, passed=True)


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "baselines")


def successors(
    store: BaselineStore, stored: dict[str, int], now: dict[str, int]
) -> dict[str, tuple[str | None, bool]]:
    for nodeid, peak in stored.items():
        module, _, test_id = nodeid.partition("::")
        entries = dict(store.load(T4, module))
        entries[test_id] = BaselineEntry.of(measured(nodeid, peak).measurement)
        store.write(T4, module, entries)
    tests = [measured(nodeid, peak) for nodeid, peak in now.items()]
    found = unused_baselines(store, tests, Collected(store.root.parent, now))
    return {one.nodeid: (one.successor, one.same) for one in found}


def test_entries_of_existing_tests_are_not_unused(store: BaselineStore) -> None:
    assert successors(store, {"a.py::test_x": 512}, {"a.py::test_x": 1024}) == {}


def test_a_moved_test_is_found_by_name_and_a_renamed_one_by_numbers(store: BaselineStore) -> None:
    stored = {"a.py::test_size[1]": 512, "a.py::test_size[2]": 1024, "a.py::test_step": 4096}
    now = {"b.py::test_size[2]": 1024, "b.py::test_size[1]": 512, "a.py::test_step_twice": 4096}
    assert successors(store, stored, now) == {
        "a.py::test_size[1]": ("b.py::test_size[1]", True),
        "a.py::test_size[2]": ("b.py::test_size[2]", True),
        "a.py::test_step": ("a.py::test_step_twice", True),
    }


def test_numbers_identify_a_test_only_where_they_are_unique(store: BaselineStore) -> None:
    now = {"b.py::test_other": 3 * MIB}
    assert successors(store, {"a.py::test_x": 3 * MIB}, now) == {
        "a.py::test_x": ("b.py::test_other", True)
    }
    # Small numbers occur in many tests.
    assert successors(store, {"c.py::test_y": 512}, {"b.py::test_else": 512})["c.py::test_y"] == (
        None,
        False,
    )


def test_a_similar_name_with_other_numbers_is_an_uncertain_successor(store: BaselineStore) -> None:
    now = {"a.py::test_long_sequence": 8192, "a.py::test_b": 512}
    assert successors(store, {"a.py::test_long_sequences": 4096, "a.py::test_a": 1024}, now) == {
        "a.py::test_a": (None, False),
        "a.py::test_long_sequences": ("a.py::test_long_sequence", False),
    }


def test_a_test_is_the_successor_of_only_one_entry(store: BaselineStore) -> None:
    stored = {"a.py::test_size[1]": 512, "a.py::test_size[2]": 512}
    found = successors(store, stored, {"a.py::test_sizes[1]": 512})
    assert found == {
        "a.py::test_size[1]": ("a.py::test_sizes[1]", True),
        "a.py::test_size[2]": (None, False),
    }


def test_other_environments_and_uncollected_modules_do_not_count(
    store: BaselineStore,
) -> None:
    store.write(L4, "a.py", {"test_x": BaselineEntry(512, 512, 0, 0)})
    store.write(T4, "b.py", {"test_x": BaselineEntry(512, 512, 0, 0)})
    tests = [measured("a.py::test_y", 512)]
    partial = Collected(store.root.parent, ["a.py::test_y"], partial="paths were given")
    assert unused_baselines(store, tests, partial) == []


SOURCE = """
if True:
    def test_hidden(): ...

class TestNet:
    async def test_method(self): ...
"""


def test_a_function_that_its_module_defines_is_not_gone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    collected = Collected(tmp_path, ["a.py::test_seen[1]", "a.py::TestNet::test_other"])
    gone, doubts = collected.gone(
        "a.py",
        ["test_seen[2]", "test_hidden[1]", "test_hidden[2]", "TestNet::test_method", "test_gone"],
    )
    assert gone == ["test_seen[2]", "test_gone"]
    assert doubts == {
        "a.py still defines test_hidden, which was not collected": 2,
        "a.py still defines TestNet::test_method, which was not collected": 1,
    }


def test_options_that_narrow_collection_make_every_entry_uncertain(tmp_path: Path) -> None:
    narrowed = "-o python_functions was given"
    collected = Collected(tmp_path, ["a.py::test_x"], narrowed=narrowed)
    assert collected.gone("a.py", ["test_x", "test_y"]) == (
        [],
        {narrowed: 1},
    )
