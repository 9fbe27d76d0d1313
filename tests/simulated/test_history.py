"""Where allocations were made, as snapshots show it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate


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
        assert len(snapshot_events()) == 1  # nobody has asked for anything else
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
    """C++ frames of the allocations of a product and its backward."""
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
