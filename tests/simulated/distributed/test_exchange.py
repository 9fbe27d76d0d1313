"""Exchange of values between the processes that torchrun has started."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from pytest_gpumem.sharing.database import Process
from pytest_gpumem.simulated.distributed import exchange
from pytest_gpumem.simulated.distributed.exchange import RankExchange, RankExchangeError
from pytest_gpumem.simulated.distributed.worst import imbalance
from pytest_gpumem.values.world import (
    Address,
    World,
    WorldError,
    address_of_process,
    world_of,
    world_of_process,
)

STARTED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def members(size: int) -> list[RankExchange]:
    store = HashStore()
    return [RankExchange(store, rank, size) for rank in range(size)]


def test_rank_0_gathers_from_all_ranks_and_broadcasts_to_all() -> None:
    def part(one: RankExchange) -> tuple[Any, Any, Any]:
        first = one.gather("peaks", {"peak": 10 * one.rank})
        decided = one.broadcast("the verdict", "passed" if one.rank == 0 else None)
        return first, decided, one.gather("peaks", [one.rank])

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(part, members(3))

    assert first == ([{"peak": 0}, {"peak": 10}, {"peak": 20}], "passed", [[0], [1], [2]])
    assert others == [([{"peak": 10 * r}], "passed", [[r]]) for r in (1, 2)]


def test_ranks_that_run_different_tests_are_an_error() -> None:
    first, other = members(2)
    other.gather("test_b", 1)

    with pytest.raises(
        RankExchangeError, match=r"^rank 1 runs test_b while rank 0 runs test_a; every"
    ):
        first.gather("test_a", 1)


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_CHECK_SECONDS", 0.0)
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(ended.pid, psutil.Process(ended.pid).create_time())
    store = HashStore()
    first = RankExchange(store, 0, 2)
    with monkeypatch.context() as other:
        other.setattr(exchange, "this_process", lambda: process)
        RankExchange(store, 1, 2)
    assert first.lost() == []

    ended.communicate()

    assert first.lost() == [1]
    with pytest.raises(RankExchangeError, match=r"^rank 1 ended before it sent test_a$"):
        first.gather("test_a", 1)


def test_a_rank_that_never_starts_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(exchange, "JOINING", exchange.JOINING * 0)

    with pytest.raises(
        RankExchangeError, match=r"^rank 1 has not started within 0 s: WORLD_SIZE says"
    ):
        RankExchange(HashStore(), 0, 2).gather("test_a", 1)


def test_a_process_has_the_rank_of_its_environment() -> None:
    assert world_of_process(STARTED) == World(size=4, rank=3, local_size=2)
    assert address_of_process(STARTED) == Address("node1", 29400, is_served=True)
    by_hand = {name: STARTED[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert world_of_process(by_hand) == World(size=4, rank=3, local_size=4)
    assert not address_of_process(by_hand).is_served


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {**STARTED, "RANK": "0", "WORLD_SIZE": "1"},
        world_of(8, 3).environment,
    ],
    ids=["none", "others are not to be met", "one alone", "of a simulated rank"],
)
def test_a_process_without_torchrun_has_no_world(variables: dict[str, str]) -> None:
    assert world_of_process(variables) is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number; torchrun sets it"),
        ({"RANK": "4"}, "4 is not a rank of 4; write an int from 0 to 3"),
    ],
)
def test_inconsistent_variables_are_refused(wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises(WorldError, match=f"^{sentence}$"):
        world_of_process({**STARTED, **wrong})


def test_imbalance_is_the_largest_over_the_mean() -> None:
    mib = 1 << 20
    assert imbalance({0: mib, 1: 3 * mib, 2: 2 * mib}) == (
        "all 3 ranks ran; rank 1 has the highest peak, 3.0 MiB, 50.0% over the mean, and rank 0 "
        "the lowest, 1.0 MiB"
    )
    assert imbalance({0: mib, 1: mib}) == "all 2 ranks ran and take the same, 1.0 MiB"
