"""Stacks of allocations in snapshots, and the recording of events."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError


def test_events_and_blocks_carry_their_frames() -> None:
    with simulate("T4") as gpu:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]  # there is one
        x = torch.ones(256, device="cuda")
    snapshot = gpu.snapshot()
    (frame, *_) = snapshot["segments"][0]["blocks"][0]["frames"]
    assert frame == {
        "filename": __file__,
        "line": line,
        "name": "test_events_and_blocks_carry_their_frames",
    }
    assert all(event["frames"] for event in snapshot["device_traces"][0])
    del x


def test_backward_is_traced_to_the_line_that_called_it() -> None:
    with simulate("T4") as gpu:
        layer = nn.Linear(64, 64).cuda()
        loss = layer(torch.ones(8, 64, device="cuda")).sum()
        before = len(gpu.trace)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]  # there is one
        loss.backward()
        events = gpu.snapshot()["device_traces"][0][before:]
    events = [event for event in events if event["action"] == "alloc"]
    assert events
    for event in events:
        assert (__file__, line) in {(frame["filename"], frame["line"]) for frame in event["frames"]}


def snapshot_events() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event for event in events if event["action"] == "alloc"]


def test_recording_begins_and_ends_as_on_a_gpu() -> None:
    record = torch.cuda.memory._record_memory_history
    with simulate("T4"):
        before = torch.ones(256, device="cuda")
        assert len(snapshot_events()) == 1  # recording has not begun
        record()
        assert snapshot_events() == []
        x = torch.ones(512, device="cuda")
        record(stacks="python")  # goes on
        assert [event["size"] for event in snapshot_events()] == [2048]
        record(None)
        assert snapshot_events() == []
    del before, x


@pytest.mark.skipif(
    "clear_history" not in inspect.signature(torch.cuda.memory._record_memory_history).parameters,
    reason="this torch cannot clear a recording",
)
def test_recording_is_cleared() -> None:
    record = torch.cuda.memory._record_memory_history
    with simulate("T4"):
        record()
        x = torch.ones(512, device="cuda")
        record(clear_history=True)
        assert snapshot_events() == []
        y = torch.ones(512, device="cuda")
        assert [event["size"] for event in snapshot_events()] == [2048]
        record(None)
        assert snapshot_events() == []
    del x, y


def names_of(stacks: str) -> list[list[str]]:
    """Return the C++ frames of the allocations of a product and its backward."""
    with simulate("T4", torch_version="2.11"):
        layer = nn.Linear(64, 64, bias=False).cuda()
        x = torch.ones(8, 64, device="cuda")
        torch.cuda.memory._record_memory_history(stacks=stacks)
        layer(x).softmax(-1).sum().backward()
        return [
            [frame["name"] for frame in event["frames"] if frame["filename"] == "??"]
            for event in snapshot_events()
        ]


def test_cpp_frames_name_workspace_operator_and_node() -> None:
    found = names_of("all")

    assert ["at::_ops::_softmax::call()"] in found
    workspace, operator = "at::cuda::getCUDABlasLtWorkspace()", "at::_ops::mm::call()"
    assert [workspace, operator] in found
    assert [operator, "torch::autograd::generated::MmBackward0::apply()"] in found
    assert not any(names_of("python"))


RECORD: Any = torch.cuda.memory._record_memory_history
"""Torch's own function; what it calls is replaced while a simulation is active."""


def recorded(context: str | None, enabled: str = "all") -> dict[str, Any]:
    """Return a snapshot of one freed and one live tensor, recorded with ``context``."""

    def the_alloc() -> torch.Tensor:
        return torch.ones(256, device="cuda")

    def the_free(held: list[torch.Tensor]) -> None:
        held.clear()

    with simulate("T4"):
        RECORD(enabled, context=context, stacks="python")
        kept = the_alloc()
        the_free([the_alloc()])
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        RECORD(None)
    del kept
    return snapshot


def functions(entry: dict[str, Any]) -> set[str]:
    return {frame["name"] for frame in entry.get("frames", ())} & {"the_alloc", "the_free"}


# Of each: what an allocation, a free and a live block show (c10/cuda/CUDACachingAllocator.cpp,
# maybeGatherContext and record_trace).
@pytest.mark.parametrize(
    ("context", "of_alloc", "of_free", "of_block"),
    [
        ("all", {"the_alloc"}, {"the_free"}, {"the_alloc"}),
        ("alloc", {"the_alloc"}, {"the_alloc"}, {"the_alloc"}),
        ("state", set(), set(), {"the_alloc"}),
        (None, set(), set(), set()),
    ],
)
def test_context_selects_the_events_with_stacks(
    context: str | None, of_alloc: set[str], of_free: set[str], of_block: set[str]
) -> None:
    snapshot = recorded(context)

    (block,) = [
        block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    events = {event["action"]: event for event in snapshot["device_traces"][0]}
    assert functions(events["alloc"]) == of_alloc
    assert functions(events["free_requested"]) == functions(events["free_completed"]) == of_free
    assert functions(block) == of_block


def test_enabled_state_keeps_the_last_event_alone() -> None:
    (event,) = recorded("all", enabled="state")["device_traces"][0]

    assert event["action"] == "free_completed"


def test_max_entries_keeps_the_latest_events() -> None:
    with simulate("T4"):
        RECORD(max_entries=3, stacks="python")
        for size in range(1, 5):
            torch.empty(size * 512, dtype=torch.uint8, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [(event["action"], event["size"]) for event in trace] == [
        ("alloc", 2048),
        ("free_requested", 2048),
        ("free_completed", 2048),
    ]


def test_segment_free_events_have_the_stack_of_empty_cache() -> None:
    with simulate("T4"):
        RECORD(context="all", stacks="python")
        torch.ones(256, device="cuda")
        torch.cuda.empty_cache()
        last = torch.cuda.memory._snapshot()["device_traces"][0][-1]
    assert last["action"] == "segment_free"
    assert last["frames"][0]["name"] == "empty_cache"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"enabled": "always"}, "expected state to be 'state', 'all', or None"),
        ({"context": "frees"}, "expected context to be 'state', 'alloc', 'all', or None"),
        ({"stacks": "cpp"}, "expected stacks to be 'python', or 'all'"),
    ],
)
def test_invalid_arguments_of_recording_raise_torchs_errors(
    options: dict[str, str], complaint: str
) -> None:
    with simulate("T4"), pytest.raises(RuntimeError, match=complaint):
        RECORD(**options)


def test_arguments_of_torch_2_0_are_refused() -> None:
    record: Any = torch.cuda.memory._record_memory_history
    with simulate("T4"), pytest.raises(UnsupportedOperatorError, match="record with 'all'"):
        record(True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_functions_are_named() -> None:
    scripted = torch.jit.CompilationUnit(
        "def scripted():\n    return torch.rand(311, device='cuda')\n"
    )
    with simulate("T4"):
        RECORD("state", stacks="python")
        x = scripted.scripted()
        (segment,) = torch.cuda.memory._snapshot()["segments"]
    assert segment["blocks"][0]["frames"][0]["name"] == "scripted"
    del x


_PARAMETERS = inspect.signature(torch.cuda.memory._record_memory_history).parameters


@pytest.mark.skipif("record_cuda" not in _PARAMETERS, reason="came with torch 2.15")
def test_recording_the_host_allocator_alone_records_nothing() -> None:
    """Torch 2.15.0+cu132 drops the recorded events and records no more."""
    record = torch.cuda.memory._record_memory_history
    with simulate("T4"):
        record(context=None)
        one = torch.ones(512, device="cuda")
        record(record_cuda=False, record_pinned_host_memory=True)
        two = torch.ones(512, device="cuda")
        assert snapshot_events() == []
        record()
        three = torch.ones(512, device="cuda")
        assert len(snapshot_events()) == 1
    del one, two, three
