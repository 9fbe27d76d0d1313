"""Threads that outlive the tests that started them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_gpumem.device.cuda import LeftThreads


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def start(stop: threading.Event, name: str) -> threading.Thread:
    thread = threading.Thread(target=stop.wait, name=name)
    thread.start()
    return thread


def test_a_thread_that_outlives_its_test_is_named_while_it_runs(
    stop: threading.Event,
) -> None:
    threads = LeftThreads()
    with threads.started_by("test_it.py::test_a"):
        thread = start(stop, "prefetcher")

    assert threads.notes == (
        "test_it.py::test_a left 'prefetcher' running in a thread: what it allocates is counted "
        "here",
    )
    stop.set()
    thread.join()
    assert not threads.notes


def test_a_thread_of_a_shared_fixture_may_outlive_its_test(stop: threading.Event) -> None:
    threads = LeftThreads()
    with threads.started_by("test_it.py::test_a"), threads.started_by(None):
        start(stop, "prefetcher")

    assert threads.notes == ()


def test_idle_workers_of_an_executor_are_not_reported() -> None:
    threads = LeftThreads()
    with ThreadPoolExecutor(1) as executor:
        with threads.started_by("test_it.py::test_a"):
            executor.submit(int).result()

        assert threads.notes == ()
