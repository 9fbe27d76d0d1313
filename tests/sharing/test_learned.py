"""Needs and durations of tests that runs record."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.sharing.learned import (
    FILE_NAME,
    Learned,
    TestCost,
    add_learned,
    read_learned,
)

T4, HERE = "sim-T4-torch2.13", ""


def learned(**costs: TestCost) -> Learned:
    found = Learned()
    for nodeid, cost in costs.items():
        found.learn(T4, nodeid, cost)
    return found


def test_written_records_are_read_back(tmp_path: Path) -> None:
    add_learned(tmp_path, learned(a=TestCost(seconds=1.5, reserved=20), b=TestCost(predicted=7)))
    found = read_learned(tmp_path)
    assert found.of(T4, "a") == TestCost(1.5, 20)
    assert found.of(T4, "b") == TestCost(predicted=7)
    assert found.of(T4, "c") == found.of("sim-L4-torch2.13", "a") == TestCost()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, FILE_NAME]


def test_a_later_run_replaces_only_values_that_it_measured(tmp_path: Path) -> None:
    add_learned(tmp_path, learned(a=TestCost(1.5, 20), b=TestCost(2.5, 30)))
    add_learned(tmp_path, learned(a=TestCost(reserved=25), c=TestCost(0.5)))
    found = read_learned(tmp_path)
    # The second time a ran beside other tests, so its duration is still the first one.
    assert found.of(T4, "a") == TestCost(1.5, 25)
    assert found.of(T4, "b") == TestCost(2.5, 30)
    assert found.of(T4, "c") == TestCost(0.5)


def test_anywhere_returns_the_maximum_of_all_environments() -> None:
    found = learned(a=TestCost(1.0, 50))
    found.learn("cuda-NVIDIA-L4-torch2.13", "a", TestCost(3.0, 40))
    assert found.anywhere("a") == TestCost(3.0, 50)
    assert found.anywhere("b") == TestCost()


def _add(folder: Path, number: int) -> None:
    for index in range(5):
        add_learned(folder, learned(**{f"t{number}_{index}": TestCost(1.0)}))


def test_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add, args=(tmp_path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = {nodeid for _, nodeid, _ in read_learned(tmp_path)}
    assert found == {f"t{number}_{index}" for number in range(3) for index in range(5)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema_version": 9, "environments": {"k": {"a": {"seconds": 1}}}}',
        b'{"schema_version": 1, "environments": 5}',
        b'{"schema_version": 1, "environments": {"k": {"a": {"seconds": "1"}}}}',
        b'{"schema_version": 1, "environments": {"k": {"a": {"seconds": NaN, "reserved": -1}}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert not read_learned(tmp_path)
    add_learned(tmp_path, learned(a=TestCost(1.0)))
    assert read_learned(tmp_path).of(T4, "a") == TestCost(1.0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(OSError, match=rf"{FILE_NAME} was not written: "):
        add_learned(tmp_path, learned(a=TestCost(1.0)))
