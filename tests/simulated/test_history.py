"""Where allocations were made, as snapshots show it."""

from __future__ import annotations

import inspect

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
