"""Time lines of blocks, computed by hand; however they are shortened, no peak is lost."""

from __future__ import annotations

import random

import pytest

from pytest_gpumem.attribution import timeline
from pytest_gpumem.attribution.history import Observation, Span
from pytest_gpumem.attribution.timeline import timeline_of
from tests.attribution.test_history import Made, alloc, free, history


def test_a_short_time_line_has_every_event() -> None:
    trace = history(
        alloc(1, 512),
        alloc(2, 1024, Made("torch.add", ("/home/me/project/train.py", 9, "step"))),
        free(1),
        held=[(7, 2048, None)],
        phases=[Span("call", 0, 3), Span("forward", 0, 2)],
        observations=[Observation(1, 7, "parameters", "head", "weight")],
    )
    assert timeline_of(trace) == {
        "events": 3,
        "positions": [0, 1, 2, 3],
        "categories": {
            "parameters": [2048] * 4,
            "activations": [0, 0, 1024, 1024],
            "temporaries": [0, 512, 512, 0],
        },
        "places": ["model.py:7 torch.mm", "train.py:9 torch.add"],
        "blocks": [[-1, 0], [0, 512], [1, 1024], [0, -512]],
        "phases": [["call", 0, 3], ["forward", 0, 2]],
    }


def test_a_history_without_events_has_no_time_line() -> None:
    assert timeline_of(history(held=[(7, 2048, None)])) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_long_one_keeps_the_peak_of_every_phase_exactly(seed: int) -> None:
    draw = random.Random(seed)
    live: list[int] = []
    events = []
    for address in range(20_000):
        if live and draw.random() < 0.5:
            events.append(free(live.pop(draw.randrange(len(live)))))
        else:
            live.append(address)
            events.append(alloc(address, 512 * draw.randint(1, 1000)))
    spans = [Span("call", 0, 20_000), Span("forward", 777, 9_123), Span("step", 9_200, 9_205)]
    trace = history(*events, phases=spans)
    line = timeline_of(trace)
    assert line is not None
    positions = line["positions"]
    assert len(positions) <= 2 * timeline.BUCKETS + 2 + len(spans)
    exact = trace.allocated()
    sums = [sum(series) for series in zip(*line["categories"].values(), strict=True)]
    assert sums == [exact[position] for position in positions]
    for span in spans:
        kept = [
            total
            for position, total in zip(positions, sums, strict=True)
            if span.begin <= position <= span.end
        ]
        assert max(kept) == max(exact[span.begin : span.end + 1])


def test_a_phase_that_is_entered_often_keeps_its_longest_windows() -> None:
    events = [alloc(number, 512) for number in range(2_000)]
    windows = [Span("step", begin, begin + 1 + (begin % 4)) for begin in range(0, 1_998, 2)]
    line = timeline_of(history(*events, phases=[Span("call", 0, 2_000), *windows]))
    assert line is not None
    assert len(line["phases"]) == timeline.MOST_SPANS
    assert line["phases"][0] == ["call", 0, 2_000]
    assert min(end - begin for _, begin, end in line["phases"]) == 3


def test_reserved_bytes_of_a_time_line_exclude_stray_ones() -> None:
    trace = history(alloc(1, 512), free(1))
    trace.reserved = [4096, 2 << 20, 2 << 20]
    trace.split = [3584, (2 << 20) - 512, 0]
    line = timeline_of(trace, stray_reserved=4096)
    assert line is not None
    assert line["reserved"] == [0, (2 << 20) - 4096, (2 << 20) - 4096]
    assert line["split"] == [3584, (2 << 20) - 512, 0]


def test_the_peak_of_reserved_bytes_is_kept_in_a_long_time_line() -> None:
    trace = history(*(alloc(number, 512) for number in range(9_000)))
    trace.reserved = [1 << 20] * 9_001
    trace.reserved[4_321] = 1 << 30
    line = timeline_of(trace)
    assert line is not None
    assert max(line["reserved"]) == 1 << 30
    assert 4_321 in line["positions"]
