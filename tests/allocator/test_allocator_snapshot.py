"""Snapshots in torch's schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings, OutOfMemory

MIB = 1 << 20
BASE = 0x7F0000000000


@dataclass
class Context:
    frames: list[dict[str, Any]] = field(
        default_factory=lambda: [{"filename": "model.py", "line": 7, "name": "forward"}]
    )


def test_a_segment_has_torchs_fields_and_its_blocks() -> None:
    allocator = Allocator(1 << 34, device=2)
    first = allocator.malloc(1000, stream=5)
    allocator.malloc(600, stream=5)
    allocator.free(first)
    base = BASE + 2 * (1 << 44)

    assert allocator.segments() == [
        {
            "device": 2,
            "address": base,
            "total_size": 2 * MIB,
            "allocated_size": 1024,
            "active_size": 1024,
            "requested_size": 600,
            "stream": 5,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                # A free block keeps the size of its last request, as in torch.
                {
                    "address": base,
                    "size": 1024,
                    "requested_size": 1000,
                    "state": "inactive",
                    "frames": [],
                },
                {
                    "address": base + 1024,
                    "size": 1024,
                    "requested_size": 600,
                    "state": "active_allocated",
                    "frames": [],
                },
                {
                    "address": base + 2048,
                    "size": 2 * MIB - 2048,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ],
        }
    ]


def test_the_top_level_has_torchs_keys() -> None:
    allocator = Allocator(1 << 34)
    allocator.malloc(512)
    snapshot = allocator.snapshot()

    assert list(snapshot) == [
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
    ]
    assert snapshot["segments"] == allocator.segments()
    assert [len(trace) for trace in snapshot["device_traces"]] == [2]


def test_host_memory_is_part_of_a_snapshot_since_2_14() -> None:
    snapshot = Allocator(1 << 34, version=(2, 14)).snapshot()

    assert (snapshot["host_segments"], snapshot["host_traces"]) == ([], [])


@pytest.mark.parametrize(
    ("version", "extra"),
    [
        ((2, 6), {}),
        ((2, 8), {"compile_context": "N/A"}),
        ((2, 10), {"compile_context": "N/A", "user_metadata": ""}),
        ((2, 12), {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}),
    ],
)
def test_trace_entries_follow_the_release(version: tuple[int, int], extra: dict[str, Any]) -> None:
    allocator = Allocator(1 << 34, version=version)
    allocator.malloc(600)

    assert allocator.snapshot()["device_traces"][0] == [
        {
            "action": "segment_alloc",
            "addr": BASE,
            "size": 2 * MIB,
            "stream": 0,
            "time_us": 0,
            **extra,
        },
        {"action": "alloc", "addr": BASE, "size": 600, "stream": 0, "time_us": 1, **extra},
    ]


def test_an_oom_event_shows_the_free_bytes() -> None:
    allocator = Allocator(MIB, version=(2, 6))
    with pytest.raises(OutOfMemory):
        allocator.malloc(512)

    assert allocator.snapshot()["device_traces"][0] == [
        {"action": "oom", "device_free": MIB, "size": 512, "stream": 0, "time_us": 0}
    ]


def test_frames_of_a_context_are_shown_where_torch_shows_them() -> None:
    allocator = Allocator(1 << 34)
    context = Context()
    address = allocator.malloc(600, context=context)
    snapshot = allocator.snapshot()

    segment = snapshot["segments"][0]
    assert list(segment)[-2:] == ["blocks", "frames"]
    assert segment["frames"] == context.frames
    assert [block["frames"] for block in segment["blocks"]] == [context.frames, []]
    assert [event["frames"] for event in snapshot["device_traces"][0]] == [context.frames] * 2
    allocator.free(address)
    assert [block["frames"] for block in allocator.segments()[0]["blocks"]] == [[]]


def test_a_context_without_frames_shows_none() -> None:
    allocator = Allocator(1 << 34)
    allocator.malloc(600, context="forward")

    assert allocator.snapshot()["device_traces"][0][1]["frames"] == []


@pytest.mark.parametrize(
    ("version", "added"),
    [
        ((2, 6), {}),
        ((2, 9), {"graph_capture_record_stream_reuse": False}),
        (
            (2, 13),
            {
                "graph_capture_record_stream_reuse": False,
                "max_round_threshold": -1,
                "max_cached_size": -1,
            },
        ),
    ],
)
def test_settings_keys_follow_the_release(version: tuple[int, int], added: dict[str, Any]) -> None:
    conf = "max_split_size_mb:64,roundup_power2_divisions:[1:2]"
    settings = AllocatorSettings.parse(conf, version)

    assert Allocator(1 << 34, settings, version).snapshot()["allocator_settings"] == {
        "PYTORCH_CUDA_ALLOC_CONF": conf,
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {str(1 << slot): 2 if slot == 0 else 0 for slot in range(16)},
        **added,
    }
