"""Snapshot files: recordings are read, other pickles are refused without running their code."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, SnapshotError, load_snapshot, replay
from pytest_gpumem.allocator.recording import line_of, release_of

Write = Callable[[bytes], Path]


@pytest.fixture
def snapshot() -> dict[str, Any]:
    allocator = Allocator(1 << 34)
    allocator.free(allocator.malloc(1000))
    allocator.malloc(3 << 20)
    return allocator.snapshot()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    path = tmp_path / "snapshot.pickle"

    def to_file(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return to_file


def refusal(path: Path) -> str:
    with pytest.raises(SnapshotError) as error:
        replay(path)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickled_snapshot_is_read(snapshot: dict[str, Any], write: Write, protocol: int) -> None:
    path = write(pickle.dumps(snapshot, protocol))

    assert load_snapshot(path) == snapshot
    assert replay(str(path)).exact


class Attack:
    """An object that creates a file when ``pickle.load`` reads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_that_a_pickle_names_is_not_run(tmp_path: Path, write: Write) -> None:
    path = write(pickle.dumps({"segments": Attack(tmp_path / "ran")}))

    assert "it refers to " in refusal(path)
    assert refusal(path).endswith("and a snapshot holds only plain values.")
    assert not (tmp_path / "ran").exists()


def test_control_characters_in_a_name_are_shown_as_plain_text(write: Write) -> None:
    path = write(b"cos\x1b[31m\nsys\x07tem\n.")
    assert "it refers to os?[31m.sys?tem, and" in refusal(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"junk", "Cannot read"),
        (b"\xfd7zXZ\x00junk", "Cannot read"),
        (b"\x1f\x8bjunk", "Cannot read"),
        (b"BZhjunk", "Cannot read"),
        (pickle.dumps({"segments": [], "device_traces": []})[:-5], "Cannot read"),
    ],
)
def test_a_damaged_file_is_refused(write: Write, content: bytes, reason: str) -> None:
    assert reason in refusal(write(content))


@pytest.mark.parametrize(
    "bomb",
    [
        # A memo slot of index 2**31, and a string of 2**40 bytes.
        b"\x80\x04]r\x00\x00\x00\x80.",
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    ],
)
def test_a_small_file_cannot_exhaust_memory(
    write: Write, bomb: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(bomb)
    before = resource.getrlimit(resource.RLIMIT_AS)

    assert refusal(path)
    assert capfd.readouterr().err == ""
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_deeply_nested_lists_are_refused_like_flat_lists(write: Write) -> None:
    depth = 200_000
    assert "it holds a list" in refusal(
        write(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    )


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.pickle").endswith("none.pickle: No such file or directory.")
    assert refusal(tmp_path) == f"{tmp_path} is not a file; give a memory snapshot."


def test_other_pickles_are_refused(write: Write) -> None:
    assert "it holds a list, as torch.cuda.memory_snapshot()" in refusal(write(pickle.dumps([1])))
    assert refusal(write(pickle.dumps(3))).endswith("it holds a int.")
    assert "has no segments and device_traces" in refusal(write(pickle.dumps({"segments": []})))
    empty: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    assert "holds no events" in refusal(write(pickle.dumps(empty)))


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("device_traces", 0), 7, "The trace of device 0 is not a list of events."),
        (("device_traces", 0, 1), "x", "The event 1 of device 0 is a str, not a dict."),
        (("device_traces", 0, 1, "size"), "9", "The size of event 1 of device 0 is missing"),
        (("device_traces", 0, 1, "size"), True, "The size of event 1 of device 0 is missing"),
        (("device_traces", 0, 1, "addr"), 1 << 63, "The addr of event 1 of device 0 is out of"),
        (("device_traces", 0, 1, "size"), 1 << 44, "The size of event 1 of device 0 is out of"),
        (("device_traces", 0, 1, "size"), -1, "The size of event 1 of device 0 is out of range."),
        (("device_traces", 0, 1, "action"), None, "The action of event 1 of device 0 is missing"),
        (("device_traces", 0, 1, "action"), [], "The action of event 1 of device 0 is missing"),
        (("segments", 0), [], "The segment 0 is a list, not a dict."),
        (("segments", 0, "segment_type"), "big", "The type of segment 0 is neither small nor"),
        (("segments", 0, "blocks"), {}, "The blocks of segment 0 are not a list."),
        (("segments", 0, "total_size"), 512, "The blocks of segment 0 do not add up to its size."),
        (("segments", 0, "blocks", 0, "state"), 1, "The state of a block of segment 0 is missing"),
    ],
)
def test_a_snapshot_of_the_wrong_shape_is_refused(
    snapshot: dict[str, Any], write: Write, place: tuple[Any, ...], value: Any, sentence: str
) -> None:
    inner: Any = snapshot
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value

    assert refusal(write(pickle.dumps(snapshot))).startswith(sentence)


def test_a_free_without_an_allocation_is_refused(snapshot: dict[str, Any], write: Write) -> None:
    trace = snapshot["device_traces"][0]
    freed = next(event for event in trace if event["action"] == "free_completed")
    trace.append({**freed, "addr": 0x1000})

    assert "cannot be repeated: Address 0x1000 is not a live block" in refusal(
        write(pickle.dumps(snapshot))
    )


@pytest.mark.parametrize(
    ("torch", "rules"),
    [((2, 6), (2, 6)), ((2, 8), (2, 9)), ((2, 10), (2, 11)), ((2, 12), (2, 13))],
)
def test_the_release_is_inferred_from_the_keys_of_events(
    torch: tuple[int, int], rules: tuple[int, int]
) -> None:
    allocator = Allocator(1 << 34, version=torch)
    allocator.malloc(1000)
    assert release_of(allocator.snapshot()) == rules


def test_the_line_of_an_event_is_in_the_users_code() -> None:
    frames = [
        {"filename": "CUDACachingAllocator.cpp", "line": 0, "name": "malloc"},
        {"filename": "/usr/lib/python3/torch/nn/functional.py", "line": 5, "name": "linear"},
        {"filename": "model.py", "line": 7, "name": "forward"},
        {"filename": "train.py", "line": 9, "name": "main"},
    ]
    assert line_of({"frames": frames}) == "model.py:7, forward"
    assert line_of({"frames": frames[:2]}) == "/usr/lib/python3/torch/nn/functional.py:5, linear"
    assert line_of({"frames": frames[:1]}) == line_of({}) == ""


def test_more_devices_than_torch_knows_are_refused(snapshot: dict[str, Any], write: Write) -> None:
    traces = [*snapshot["device_traces"], *([] for _ in range(100_000))]
    path = write(pickle.dumps({**snapshot, "device_traces": traces}))

    assert refusal(path) == (
        "The snapshot has traces of 100,001 devices, and torch knows 120 at most."
    )


def test_a_trace_that_repeats_one_event_object_is_refused(
    snapshot: dict[str, Any], write: Write
) -> None:
    (trace,) = snapshot["device_traces"]
    path = write(pickle.dumps({**snapshot, "device_traces": [[*trace, *trace[1:4] * 1000]]}))

    assert path.stat().st_size < 10_000
    assert refusal(path) == (
        "The trace of device 0 holds the same event more than once, so "
        "it is not a recording of torch."
    )


def test_segments_that_share_their_blocks_are_refused(
    snapshot: dict[str, Any], write: Write
) -> None:
    first = snapshot["segments"][0]
    path = write(pickle.dumps({**snapshot, "segments": [first, {**first, "address": 1}]}))

    assert refusal(path) == (
        "The snapshot holds the same list of blocks more than once, so "
        "it is not a recording of torch."
    )
