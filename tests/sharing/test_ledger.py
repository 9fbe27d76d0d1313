"""The ledger that all runs of a host share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from pytest_gpumem.sharing.admission import Budget, Need
from pytest_gpumem.sharing.database import FOLDER_VARIABLE, SharingError, default_folder
from pytest_gpumem.sharing.ledger import FILE_NAME, SECONDS_KEPT, Ledger, Stay

GPU = {"gpu": Budget(100)}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.close()


@pytest.fixture
def worker(ledger: Ledger) -> int:
    return ledger.join("run", "gw0")


def test_a_test_is_granted_memory_and_gives_it_back(ledger: Ledger, worker: int) -> None:
    first, second = (ledger.ask(worker, name, {"gpu": 60}) for name in ("a", "b"))
    assert ledger.try_grant(first, GPU).granted
    assert not ledger.try_grant(second, GPU).granted
    ledger.release(first)
    assert ledger.try_grant(second, GPU).granted
    assert [(stay.nodeid, stay.bytes) for stay in ledger.stays()] == [("a", 60)]
    assert [(test.nodeid, test.needs) for test in ledger.state(GPU).running] == [("b", {"gpu": 60})]


def test_memory_that_workers_hold_between_tests_counts(ledger: Ledger, worker: int) -> None:
    ledger.hold(worker, "gpu", context=10, fixtures=31)
    test = ledger.ask(worker, "a", {"gpu": 60})
    assert not ledger.try_grant(test, GPU).granted
    ledger.hold(worker, "gpu", context=10, fixtures=30)
    assert ledger.try_grant(test, GPU).granted


def test_waiting_and_running_tests_can_be_read(ledger: Ledger, worker: int) -> None:
    running = ledger.ask(worker, "a", {"gpu": 60}, Need(60, "max", duration=2.0))
    ledger.try_grant(running, GPU)
    alone = Need(60, "max", exclusive=True, priority=3, guaranteed=False)
    ledger.ask(worker, "b", {"gpu": 60}, alone)
    state = ledger.state(GPU)
    assert [test.nodeid for test in state.running] == ["a"]
    (waiting,) = state.waiting
    assert (waiting.nodeid, waiting.run, waiting.worker) == ("b", "run", "gw0")
    assert waiting.pid == os.getpid()
    assert (waiting.exclusive, waiting.priority, waiting.guaranteed) == (True, 3, False)


def test_a_worker_that_leaves_gives_all_memory_back(ledger: Ledger, worker: int) -> None:
    ledger.hold(worker, "gpu", context=10, fixtures=20)
    ledger.try_grant(ledger.ask(worker, "a", {"gpu": 60}), GPU)
    ledger.leave(worker)
    state = ledger.state(GPU)
    assert not state.running
    assert state.devices["gpu"].free("gpu", ()) == 100


def test_the_log_keeps_a_day(tmp_path: Path) -> None:
    now = [1000.0]
    ledger = Ledger(tmp_path, clock=lambda: now[0])
    worker = ledger.join("run", "gw0")
    test = ledger.ask(worker, "a", {"gpu": 1})
    ledger.try_grant(test, GPU)
    ledger.release(test)
    assert ledger.stays() == [Stay("run", "gw0", "a", "gpu", 1000.0, 1000.0, 1)]
    now[0] += SECONDS_KEPT + 1
    ledger.join("run", "gw1")
    assert ledger.stays() == []


HOLDER = """
    import sys, time
    from pathlib import Path
    from pytest_gpumem.sharing.admission import Budget, Need
    from pytest_gpumem.sharing.ledger import Ledger

    ledger = Ledger(Path(sys.argv[1]))
    worker = ledger.join("other", "gw9")
    ledger.hold(worker, "gpu", context=0, fixtures=20)
    test = ledger.ask(worker, "theirs", {"gpu": 60})
    assert ledger.try_grant(test, {"gpu": Budget(100)}).granted
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds 80 of 100 bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(HOLDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no SIGKILL")
def test_memory_of_a_killed_process_is_void(
    ledger: Ledger, worker: int, holder: subprocess.Popen[str]
) -> None:
    test = ledger.ask(worker, "a", {"gpu": 60})
    assert not ledger.try_grant(test, GPU).granted
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert ledger.try_grant(test, GPU).granted
    assert [stay.nodeid for stay in ledger.stays()] == ["theirs"]
    assert [running.nodeid for running in ledger.state(GPU).running] == ["a"]


def test_a_reused_pid_is_not_the_earlier_process(ledger: Ledger) -> None:
    from pytest_gpumem.sharing.database import Process

    ledger.join("gone", "gw0", Process(os.getpid(), 1.0))
    ledger.state({})
    assert ledger.owners() == {}


def spoil_file(folder: Path) -> None:
    (folder / FILE_NAME).write_bytes(b"not a database, but long enough to be read as one" * 100)


def spoil_folder(folder: Path) -> None:
    (folder / FILE_NAME).mkdir()


@pytest.mark.parametrize("spoil", [spoil_file, spoil_folder])
def test_a_ledger_that_cannot_be_opened_names_a_remedy(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path)
    with pytest.raises(SharingError, match=rf"{FILE_NAME} cannot be opened: .*; remove it, or set"):
        Ledger(tmp_path)


def test_the_folder_belongs_to_host_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/somewhere")
    assert default_folder() == Path("/somewhere")
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert default_folder().name.startswith("pytest-gpumem-")


def test_the_number_of_tests_beside_a_test(ledger: Ledger) -> None:
    workers = [ledger.join("run", f"gw{number}") for number in range(3)]
    devices = {"gpu": Budget(100), "other": Budget(100)}

    def begin(worker: int, name: str, device: str = "gpu") -> int:
        test = ledger.ask(workers[worker], name, {device: 10})
        assert ledger.try_grant(test, devices).granted
        return test

    assert ledger.neighbours(workers[0]) is None
    ledger.release(begin(1, "before"))
    first = begin(1, "when it began")
    begin(0, "test")
    assert ledger.neighbours(workers[0]) == 1
    ledger.release(first)
    ledger.release(begin(2, "meanwhile"))
    begin(1, "still")
    begin(2, "elsewhere", "other")
    assert ledger.neighbours(workers[0]) == 3
