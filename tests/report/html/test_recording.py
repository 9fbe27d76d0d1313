"""The page's data of a recording, computed by hand for an allocator with three blocks."""

from __future__ import annotations

import json
import random
import zlib
from base64 import b64decode
from collections.abc import Iterable
from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator
from pytest_gpumem.report.html.page import RECORDING, assembled, packed
from pytest_gpumem.report.html.recording import recording_of
from pytest_gpumem.simulated.gpu.replay import replay
from tests.report.html.parsed import Page

MIB = 1 << 20
MODULE = "/env/torch/nn/modules/module.py"


class Stack:
    """A stand-in for the stack that allocates."""

    def __init__(self, *frames: tuple[str, str, int]) -> None:
        self.frames = [
            {"filename": file, "name": name, "line": line} for file, name, line in frames
        ]


FORWARD = Stack(("/app/src/model.py", "forward", 7), (MODULE, "_call_impl", 1))
LOADING = Stack(("/app/main.py", "load", 3))


def recorded() -> Allocator:
    """Record a block of 30 MiB, then 3 MiB that are kept and 5 MiB that forward frees."""
    allocator = Allocator(1 << 40, version=(2, 6))
    large = allocator.malloc(30 * MIB, context=LOADING)
    allocator.malloc(3 * MIB, context=FORWARD)
    allocator.free(allocator.malloc(5 * MIB, context=FORWARD))
    allocator.free(large)
    return allocator


def parsed(snapshot: dict[str, Any], **question: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the page's first device and its columns: changes, reserved and split bytes."""
    parsed = replay(snapshot, courses=True, **question)
    data, (text, *_) = recording_of("run.pickle", parsed, notes=[], used_elsewhere=0)
    columns = json.loads(zlib.decompress(b64decode(text)))
    return data["devices"][0], [columns["blocks"], *columns["reserved"], *columns["split"]]


def test_every_event_has_its_allocated_reserved_and_split_bytes() -> None:
    device, (did, reserved, split) = parsed(recorded().snapshot())
    assert device["kinds"] == [[30 * MIB, 0], [3 * MIB, 1], [5 * MIB, 2]]
    # segment, alloc; segment, alloc; alloc, free requested and completed; the same for the large
    assert did == [0, 1, 0, 3, 5, 0, 6, 0, 2]
    # The first number of each column is the state at the start.
    assert reserved == [0, 0, 30 * MIB, 0, 20 * MIB, 0, 0, 0, 0, 0]
    assert split == [0, 0, 0, 0, 17 * MIB, -5 * MIB, 0, 5 * MIB, 0, 0]


def test_events_add_up_to_the_peak_of_the_allocator() -> None:
    draw = random.Random(7)
    allocator = Allocator(1 << 44, version=(2, 6))
    live: list[int] = []
    for _ in range(3_000):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.malloc(draw.randint(1, 40 * MIB), context=FORWARD))
    late = allocator.snapshot()
    late["device_traces"] = [late["device_traces"][0][1_001:]]
    for snapshot in (allocator.snapshot(), late):
        device, (did, *_) = parsed(snapshot)
        held = sum(count * device["kinds"][kind][0] for kind, count in device["start"])
        changes = [
            0 if not one else device["kinds"][(one - 1) // 2][0] * (1 if one % 2 else -1)
            for one in did
        ]
        series = list(accumulate(changes, initial=held))
        assert max(series) == device["recorded"]["usage"]["peak_allocated"]
        assert series[-1] == allocator.allocated


def test_places_have_line_category_and_a_path_relative_to_the_program() -> None:
    device, _ = parsed(recorded().snapshot())
    assert [(one["category"], one["site"], one["function"]) for one in device["places"]] == [
        ("other", "main.py:3", "load"),
        ("activations", "src/model.py:7", "forward"),
        ("temporaries", "src/model.py:7", "forward"),
    ]
    assert device["places"][1]["stack"] == ["src/model.py:7 forward", "module.py:1 _call_impl"]


def test_segments_are_listed_at_the_peak_and_at_the_end() -> None:
    device, _ = parsed(recorded().snapshot())
    run = device["recorded"]
    # The peak is after the fifth event, while 50 MiB were reserved.
    assert run["fullest"] == 5
    assert run["usage"]["fragmentation"] == 12 * MIB
    assert run["segments"]["peak"] == [
        {"bytes": 30 * MIB, "stream": 0, "small": False, "parts": [[7, 30 * MIB, 1]]},
        {
            "bytes": 20 * MIB,
            "stream": 0,
            "small": False,
            "parts": [[4, 3 * MIB, 1], [6, 5 * MIB, 1], [-1, 12 * MIB, 1]],
        },
    ]
    assert [one["parts"] for one in run["segments"]["end"]] == [
        [[-1, 30 * MIB, 1]],
        [[4, 3 * MIB, 1], [-1, 17 * MIB, 1]],
    ]


def test_blocks_from_before_the_recording_are_live_at_the_start() -> None:
    snapshot = recorded().snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][2:]
    device, (did, reserved, split) = parsed(snapshot)
    assert device["start"] == [[0, 1]]
    assert device["kinds"][0] == [30 * MIB, 0]
    assert device["places"][0]["operator"] == "allocated before recording began"
    assert did[-1] == 2
    assert (reserved[0], split[0]) == (30 * MIB, 0)


def test_a_what_if_is_a_second_run_of_the_page() -> None:
    device, (_, _, tried, *_) = parsed(recorded().snapshot(), alloc_conf="expandable_segments:True")
    assert device["what_if"]["usage"]["peak_allocated"] == 38 * MIB
    assert len(tried) - 1 == device["events"] == 9


def test_a_what_if_that_runs_out_of_memory_ends_there() -> None:
    allocator = Allocator(1 << 40, version=(2, 6))
    allocator.malloc(6 << 30)
    allocator.malloc(6 << 30)
    device, (_, _, tried, *_) = parsed(allocator.snapshot(), gpu="RTX-4060")
    assert device["what_if"]["usage"]["out_of_memory"]["event"] == 3
    assert len(tried) - 1 < device["events"] == 4


def test_a_what_if_whose_start_does_not_fit_has_no_events() -> None:
    snapshot = recorded().snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][2:]
    snapshot["segments"].append(
        {**deepcopy(snapshot["segments"][0]), "address": 1 << 46, "total_size": 9 << 30}
    )
    large = {"size": 9 << 30, "requested_size": 9 << 30, "state": "active_allocated"}
    snapshot["segments"][-1]["blocks"] = [large]
    device, (_, recorded_reserved, tried, *_) = parsed(snapshot, gpu="RTX-4060")
    assert device["what_if"]["usage"]["out_of_memory"]["event"] == -1
    assert (len(recorded_reserved) - 1, tried) == (device["events"], [])


def test_the_data_of_a_loop_are_small() -> None:
    assert len(packed([512, 1024, -512, 4096, -1024, -4096] * 100_000)) < 20_000


@pytest.mark.parametrize("odd", [None, 7, "text", [None, 3], [{"filename": 3}]])
def test_malformed_frames_are_ignored(odd: Any) -> None:
    snapshot = recorded().snapshot()
    for event in snapshot["device_traces"][0]:
        event["frames"] = odd
    device, _ = parsed(snapshot)
    assert {one["category"] for one in device["places"]} == {"other"}


def test_a_hostile_source_line_is_text() -> None:
    def page(names: Iterable[str]) -> Page:
        allocator = Allocator(1 << 40, version=(2, 6))
        for name in names:
            allocator.malloc(MIB, context=Stack((f"/app/{name}.py", name, 1)))
        parsed = replay(allocator.snapshot(), courses=True)
        return Page(
            assembled(
                "recording.html",
                RECORDING,
                *recording_of("a</script>.pickle", parsed, notes=[], used_elsewhere=0),
            )
        )

    hostile = page(["</script><img src=x onerror=alert(1)>", "\x1b[31mred"])
    assert hostile.tags == page(["first", "second"]).tags
    assert hostile.overview["devices"][0]["places"][1]["function"] == "\\x1b[31mred"
