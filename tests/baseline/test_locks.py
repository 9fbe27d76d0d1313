"""Several processes that write the baselines of one folder at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.baseline.store import BaselineEntry, BaselineError
from pytest_gpumem.values.environment import Environment
from tests.stores import BaselineStore

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
MODULE = "tests/test_a.py"

PRELUDE = """
import sys
from pathlib import Path
from pytest_gpumem.baseline.store import BaselineEntry, BaselineStore
from pytest_gpumem.values.environment import Environment
T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
store = BaselineStore(Path(sys.argv[1]))
"""
ADD = """
for number in range(6):
    name = f"test_{sys.argv[2]}_{number}"
    store.edit(T4, "tests/test_a.py", lambda tests: tests.update({name: BaselineEntry(1, 1, 1, 1)}))
"""
HOLD = """
def edit(tests):
    tests["test_held"] = BaselineEntry(1, 1, 1, 1)
with store._locks.holding() as draft:
    draft.write_bytes(b"half a fi")
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "baselines", patience=0.0)


def entry(size: int) -> BaselineEntry:
    return BaselineEntry(size, size, 0, 0)


def started(script: str, store: BaselineStore, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(store.root), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def holder(store: BaselineStore) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of the module's file, with a half-written draft."""
    with started(HOLD, store) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        try:
            yield process
        finally:
            process.kill()


def files(root: Path) -> list[str]:
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(FOLDER))


def test_processes_that_write_one_file_at_once_lose_nothing(store: BaselineStore) -> None:
    writers = [started(ADD, store, str(number)) for number in range(4)]
    assert [writer.communicate()[0] for writer in writers] == [""] * 4
    assert [writer.returncode for writer in writers] == [0] * 4
    expected = {f"test_{writer}_{number}" for writer in range(4) for number in range(6)}
    assert store.load(T4, MODULE).keys() == expected
    assert files(store.root) == ["sim-T4-torch2.13/tests/test_a.py.json"]


def test_a_change_between_reading_and_writing_is_kept(store: BaselineStore) -> None:
    seen = []

    def edit(tests: MutableMapping[str, BaselineEntry]) -> None:
        seen.append(sorted(tests))
        if len(seen) == 1:
            BaselineStore(store.root).write(T4, MODULE, {"test_theirs": entry(2)})
        tests["test_ours"] = entry(1)

    store.edit(T4, MODULE, edit)
    assert seen == [[], ["test_theirs"]]
    assert store.load(T4, MODULE) == {"test_ours": entry(1), "test_theirs": entry(2)}


def test_a_held_lock_is_an_error_that_names_the_holder(store: BaselineStore) -> None:
    with holder(store) as process:
        with pytest.raises(BaselineError) as error:
            store.write(T4, MODULE, {"test": entry(1)})
        path = store.path(T4.key, MODULE)
        sentence = str(error.value).replace(str(path), "FILE").replace(str(store.root), "ROOT")
        host = os.uname().nodename
        assert sentence == (
            f"baseline FILE was not written: process {process.pid} on {host} has been writing it "
            f"for 1 s; run again when that has ended, or delete ROOT/{FOLDER} where no such "
            "process exists any more"
        )
        assert not path.exists()


def test_a_killed_writer_leaves_no_lock_and_its_draft_is_deleted(store: BaselineStore) -> None:
    store.write(T4, MODULE, {"test_old": entry(1)})
    with holder(store) as process:
        process.kill()
    assert store.load(T4, MODULE) == {"test_old": entry(1)}
    assert (store.root / FOLDER / "draft").read_bytes() == b"half a fi"
    store.write(T4, "tests/test_b.py", {"test": entry(2)})
    assert files(store.root) == [
        "sim-T4-torch2.13/tests/test_a.py.json",
        "sim-T4-torch2.13/tests/test_b.py.json",
    ]
    assert not (store.root / FOLDER / "draft").exists()


@pytest.mark.skipif(which("git") is None, reason="needs git")
def test_git_ignores_locks_and_drafts_of_killed_writers(store: BaselineStore) -> None:
    def status() -> str:
        command = ["git", "-C", str(store.root), "status", "--porcelain", "--untracked-files=all"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    store.write(T4, "tests/test_b.py", {"test": entry(1)})
    subprocess.run(["git", "-C", str(store.root), "init", "-q"], check=True)
    known = status()
    assert known == "?? sim-T4-torch2.13/tests/test_b.py.json\n"
    with holder(store) as process:
        assert status() == known
        process.kill()
    assert status() == known


@pytest.mark.parametrize("answer", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EIO"])
def test_a_lock_of_a_file_system_without_flock_is_a_file_that_names_its_holder(
    store: BaselineStore, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def missing(descriptor: int, operation: int) -> None:
        raise OSError(getattr(errno, answer), os.strerror(getattr(errno, answer)))

    monkeypatch.setattr("fcntl.flock", missing)
    store.write(T4, MODULE, {"test": entry(1)})
    assert files(store.root) == ["sim-T4-torch2.13/tests/test_a.py.json"]
    # Whether a process of another host lives is unknown.
    folder = store.root / FOLDER
    (folder / "lock").write_text("123\nelsewhere\n")
    (folder / "holder").write_text("process 123 on elsewhere")
    with pytest.raises(
        BaselineError, match="not written: process 123 on elsewhere has been writing"
    ):
        store.write(T4, MODULE, {"test": entry(2)})


def test_a_folder_without_changes_is_not_written_to(store: BaselineStore) -> None:
    store.write(T4, MODULE, {"test": entry(1)})
    before = store.root.stat().st_mtime_ns
    time.sleep(0.01)
    assert store.write(T4, MODULE, {"test": entry(1)}) is None
    assert store.root.stat().st_mtime_ns == before


def test_the_folder_of_locks_is_no_environment(store: BaselineStore) -> None:
    store.write(T4, MODULE, {"test": entry(1)})
    other = Environment(simulated=True, gpu="A10", compute_capability="8.6", torch="2.13")
    with store._locks.holding():
        found = store.elsewhere(MODULE, "test", other)
    assert found == [(T4, entry(1))]
