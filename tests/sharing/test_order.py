"""The order in which tests are sent to workers."""

from __future__ import annotations

from types import SimpleNamespace

from pytest_gpumem.sharing.admission import NEEDS_NO_GPU, Need, Place
from pytest_gpumem.sharing.order import MemoryScheduling, next_test


def need(size: int | None, duration: float | None = None, **more: bool | int) -> Need:
    return Need(size, "max", duration, **more)  # type: ignore[arg-type]  # each by its own type


def test_the_largest_test_that_fits_is_next() -> None:
    pending = [need(10), need(60), need(40), need(41)]
    assert next_test(pending, [need(60)], 100) == 2


def test_long_tests_count_by_memory_times_duration() -> None:
    assert next_test([need(40, 1.0), need(10, 5.0)], [], 100) == 1


def test_the_smallest_test_is_next_where_none_fits() -> None:
    assert next_test([need(90), need(50), need(70)], [need(60)], 100) == 1


def test_a_test_without_memory_is_next_where_no_other_fits() -> None:
    assert next_test([need(90), NEEDS_NO_GPU], [need(60)], 100) == 1
    assert next_test([need(30), NEEDS_NO_GPU], [need(60)], 100) == 0


def test_an_exclusive_test_is_next_where_the_device_is_empty() -> None:
    alone = need(1, exclusive=True)
    assert next_test([alone, need(10)], [need(1)], 100) == 1
    assert next_test([need(None), need(10)], [], 100) == 0


def test_tests_of_priority_are_first_and_opportunistic_ones_last() -> None:
    assert next_test([need(50), need(10, priority=1)], [], 100) == 1
    assert next_test([need(50, guaranteed=False), need(10)], [], 100) == 1


class Config:
    """The part of pytest's configuration that the scheduler reads."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def getvalue(self, name: str) -> list[str]:
        assert name == "tx"
        return ["popen"] * self.workers

    def getoption(self, name: str) -> None:
        assert name == "maxschedchunk"


class Worker:
    """A worker that records the tests that it was sent."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(tests: list[str], places: dict[str, Place]) -> dict[str, list[str]]:
    """Return the tests that each worker is sent first."""
    workers = [Worker(name) for name in places]
    log = SimpleNamespace(loadsched=lambda *words: None)
    scheduling = MemoryScheduling(Config(len(places)), log, places.__getitem__)  # type: ignore[arg-type]  # its part
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    return {worker.gateway.id: [tests[index] for index in worker.sent] for worker in workers}


def test_only_tests_on_one_device_count_as_beside_each_other() -> None:
    needs = {name: need(size) for name, size in {"a": 60, "b": 60, "c": 50, "d": 30}.items()}
    tests = [*needs, "e", "f", "g", "h"]
    one, other = Place("one", 100, needs), Place("other", 100, needs)
    # On one device the second worker gets a test that fits beside the first's last test; on
    # another device the first's tests do not count.
    assert scheduled(tests, {"gw0": one, "gw1": one})["gw1"][0] == "d"
    assert scheduled(tests, {"gw0": one, "gw1": other})["gw1"][0] == "c"


def test_tests_of_a_gpu_go_to_workers_with_a_gpu() -> None:
    needs = {name: need(10) for name in "abcd"}
    tests = [*needs, "e", "f"]
    gpu, none = Place("gpu", 100, needs, real=True), Place("simulated", 100, needs)
    sent = scheduled(tests, {"gw0": none, "gw1": gpu})
    assert sent["gw0"] == ["e", "f"]
    assert {*sent["gw1"]} <= {*needs}
    # Where no worker has a GPU, all simulate one.
    assert scheduled(tests, {"gw0": none, "gw1": none})["gw0"] == ["a", "b"]
