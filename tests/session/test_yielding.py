"""A test yields while it runs where the system has signals, and runs to its end elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from pytest_gpumem.session import device_admissions
from pytest_gpumem.session.device_admissions import YieldedError, interruptible


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals for one thread")
def test_a_body_ends_early_where_another_test_waits() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(YieldedError), interruptible(lambda: True):
        time.sleep(60)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_body_runs_to_its_end_without_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_admissions, "_SIGNAL", None)  # as Windows has it

    def another_waits() -> bool:
        pytest.fail("no test is asked")

    with interruptible(another_waits):
        time.sleep(2 * device_admissions.CHECK_SECONDS)


def test_a_body_in_another_thread_runs_to_its_end() -> None:
    ended: list[str] = []

    def body() -> None:
        with interruptible(lambda: True):
            time.sleep(2 * device_admissions.CHECK_SECONDS)
        ended.append("whole")

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert ended == ["whole"]
