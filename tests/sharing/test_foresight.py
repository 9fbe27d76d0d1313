"""One simulation for all workers of a host."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pytest_gpumem.session.predictions import is_worth_it, simulated_once


def test_a_simulation_is_worth_it_for_several_tests_and_workers() -> None:
    assert is_worth_it(4, 2)
    assert not is_worth_it(3, 2)
    assert not is_worth_it(100, 1)


def test_the_first_worker_simulates_and_the_others_wait(tmp_path: Path) -> None:
    asked, answers = [], []

    def simulate() -> dict[str, int]:
        asked.append(1)
        time.sleep(0.1)
        return {"a": 7, "b": 0}

    def ask() -> None:
        answers.append(simulated_once(tmp_path, "run", simulate))

    workers = [threading.Thread(target=ask) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == [{"a": 7, "b": 0}] * 3
    assert len(asked) == 1


def test_another_run_simulates_again_and_deletes_old_answers(tmp_path: Path) -> None:
    simulated_once(tmp_path, "old", lambda: {"a": 7})
    os.utime(tmp_path / "foreseen-old.json", (0, 0))
    simulated_once(tmp_path, "young", lambda: {"a": 8})
    assert simulated_once(tmp_path, "run", lambda: {"a": 9}) == {"a": 9}
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"foreseen-young.json", "foreseen-run.json"}


def test_a_worker_that_fails_leaves_the_simulation_to_the_next(tmp_path: Path) -> None:
    def fail() -> dict[str, int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated_once(tmp_path, "run", fail)
    assert simulated_once(tmp_path, "run", lambda: {"a": 9}) == {"a": 9}
