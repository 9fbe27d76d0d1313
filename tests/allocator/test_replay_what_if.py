"""Replays of a snapshot with other settings or on another GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorSettings,
    OutOfMemory,
    SettingsError,
)
from pytest_gpumem.simulated.gpu.catalogue import GPUS, GpuError
from pytest_gpumem.simulated.gpu.replay import replay

MIB = 1 << 20
GIB = 1 << 30
EXPANDABLE = "expandable_segments:True"
T4 = GPUS["T4"].total_memory


class Line:
    """A context with one frame, the line that allocates."""

    def __init__(self, line: int) -> None:
        self.frames = [{"filename": "model.py", "line": line, "name": "forward"}]


def growing(allocator: Allocator) -> None:
    """Allocate growing blocks: without expandable segments each needs a segment of its own."""
    held = 0
    for step in range(1, 9):
        following = allocator.malloc(step * 100 * MIB, context=Line(step))
        if held:
            allocator.free(held)
        held = following


def steady(allocator: Allocator) -> None:
    allocator.free(allocator.malloc(10 * GIB, context=Line(1)))
    allocator.malloc(4 * GIB, context=Line(2))
    allocator.malloc(10 * GIB, context=Line(3))


def run(program: Callable[[Allocator], None], conf: str = "", total: int = 1 << 40) -> Allocator:
    settings = AllocatorSettings.parse(conf, (2, 13))
    allocator = Allocator(total, settings, (2, 13))
    program(allocator)
    return allocator


@pytest.mark.parametrize(
    "conf", [EXPANDABLE, "roundup_power2_divisions:1", "max_split_size_mb:200", ""]
)
@pytest.mark.parametrize("program", [growing, steady])
def test_peaks_equal_those_of_a_run_with_the_other_settings(
    program: Callable[[Allocator], None], conf: str
) -> None:
    recorded, other = run(program), run(program, conf)

    result = replay(recorded.snapshot(), conf)

    (device,) = result.devices
    assert device.what_if is not None
    assert (result.exact, result.total) == (True, 8 if program is growing else 3)
    assert (result.peak_allocated, result.peak_reserved) == (
        other.peak_allocated,
        other.peak_reserved,
    )
    assert device.recorded.peak_reserved == recorded.peak_reserved
    assert device.what_if.out_of_memory is None


def test_fragmentation_and_the_largest_split_are_those_at_the_peak() -> None:
    # Every segment is freed before the next is needed, and a smaller block never fits the larger
    # one: the last step holds 800 MiB of the 3,600 that the steps have reserved, and step 7's 700
    # beside it. No segment is partly free.
    usage = replay(run(growing).snapshot()).devices[0].recorded
    assert usage.peak_reserved == sum(range(1, 9)) * 100 * MIB
    assert usage.fragmentation == usage.peak_reserved - (700 + 800) * MIB
    assert (usage.largest_split, usage.segments) == (0, 8)

    # A segment of 20 MiB, of which 5 are used.
    def one_block(allocator: Allocator) -> None:
        allocator.malloc(5 * MIB)

    split = replay(run(one_block).snapshot())
    usage = split.devices[0].recorded
    assert (usage.fragmentation, usage.largest_split, usage.segments) == (15 * MIB, 15 * MIB, 1)


def test_a_gpu_that_is_too_small_runs_out_of_memory_at_a_line() -> None:
    with pytest.raises(OutOfMemory) as real:
        run(steady, total=T4)

    result = replay(run(steady).snapshot(), gpu="t4")

    (device,) = result.devices
    shortage = result.out_of_memory
    assert (result.gpu, device.capacity) == ("T4", T4)
    assert shortage is not None
    assert shortage.line == "model.py:3, forward"
    assert device.events > shortage.event > 0
    assert shortage.requested == 10 * GIB
    # The cached 10 GiB were in pieces: 4 of them stay in use.
    assert shortage.free == real.value.fields.free == T4 - 10 * GIB
    assert device.what_if is not None
    assert device.what_if.peak_reserved == result.peak_reserved == 10 * GIB
    assert device.recorded.out_of_memory is None


def test_memory_in_use_elsewhere_reduces_the_capacity() -> None:
    def program(allocator: Allocator) -> None:
        allocator.malloc(14 * GIB)

    snapshot = run(program).snapshot()
    assert replay(snapshot, gpu="T4").out_of_memory is None
    assert replay(snapshot, gpu="T4", used_elsewhere=GIB).out_of_memory is not None


def fragmented(allocator: Allocator) -> None:
    """Reuse half of a freed segment, so that no later request fits the other half."""
    allocator.free(allocator.malloc(6 * GIB, context=Line(1)))
    allocator.malloc(3 * GIB, context=Line(2))
    allocator.malloc(4 * GIB, context=Line(3))


def test_settings_and_gpu_may_be_replaced_together() -> None:
    snapshot = run(fragmented).snapshot()

    # 3 and 4 GiB fit into 7.75 GiB, a segment of 6 and one of 4 do not.
    default = replay(snapshot, gpu="RTX-4060")
    assert default.out_of_memory is not None
    assert default.out_of_memory.line == "model.py:3, forward"
    expandable = replay(snapshot, EXPANDABLE, "RTX-4060")
    assert expandable.out_of_memory is None
    # 308 pages of 20 MiB hold the first 6 GiB, 51 more the last block behind the 3 GiB.
    assert expandable.peak_reserved == (308 + 51) * 20 * MIB


def failing(allocator: Allocator) -> None:
    """Run out of memory once, and go on."""
    first = allocator.malloc(6 * GIB, context=Line(1))
    second = allocator.malloc(2 * GIB, context=Line(2))
    allocator.free(first)
    third = allocator.malloc(4 * GIB, context=Line(3))
    with pytest.raises(OutOfMemory):
        allocator.malloc(3 * GIB, context=Line(4))
    for address in (second, third):
        allocator.free(address)


def test_a_recorded_out_of_memory_is_reported_and_replayed() -> None:
    snapshot = run(failing, total=10 * GIB).snapshot()

    recorded = replay(snapshot)
    assert recorded.exact
    shortage = recorded.devices[0].recorded.out_of_memory
    assert shortage is not None
    assert (shortage.requested, shortage.free) == (3 * GIB, 2 * GIB)
    assert shortage.line == "model.py:4, forward"
    # The capacity is what was reserved and free at the recorded failure.
    assert recorded.devices[0].capacity == 10 * GIB

    same = replay(snapshot, "")
    assert same.out_of_memory is not None
    assert same.out_of_memory.event == shortage.event
    assert replay(snapshot, EXPANDABLE).out_of_memory is None
    assert replay(snapshot, gpu="A100-40GB").out_of_memory is None


def begun_late(program: Callable[[Allocator], None]) -> dict[str, Any]:
    """Return a recording that began when 8 GiB were in use and 8 more were cached."""
    allocator = Allocator(1 << 40)
    allocator.malloc(8 * GIB)
    allocator.free(allocator.malloc(8 * GIB))
    allocator.trace.clear()
    program(allocator)
    return allocator.snapshot()


def test_a_recording_that_began_late_fits_without_its_cached_segments() -> None:
    def program(allocator: Allocator) -> None:
        allocator.malloc(GIB, context=Line(1))
        allocator.malloc(6 * GIB, context=Line(2))

    snapshot = begun_late(program)
    recorded = replay(snapshot)
    assert (recorded.exact, recorded.peak_reserved) == (True, 16 * GIB)
    assert recorded.devices[0].live_at_start == 8 * GIB

    # 15.8 GB are less than the 16 GiB held: the cached segment is given up.
    result = replay(snapshot, gpu="RTX-3060")
    assert result.out_of_memory is not None
    assert result.out_of_memory.event >= 0
    assert replay(snapshot, gpu="T4").out_of_memory is not None
    assert replay(snapshot, gpu="A10").peak_reserved == 16 * GIB


def test_blocks_that_were_live_at_the_start_may_not_fit() -> None:
    def program(allocator: Allocator) -> None:
        allocator.malloc(GIB)

    snapshot = begun_late(program)
    result = replay(snapshot, gpu="RTX-4060")
    shortage = result.out_of_memory
    assert shortage is not None
    assert (shortage.event, shortage.requested) == (-1, 8 * GIB)


def test_several_devices_are_replayed_one_by_one() -> None:
    one = run(growing)
    other = Allocator(1 << 40, device=1)
    steady(other)
    snapshot = one.snapshot()
    snapshot["segments"] += other.segments()
    snapshot["device_traces"] += other.snapshot()["device_traces"]

    result = replay(snapshot, gpu="T4")

    assert [device.device for device in result.devices] == [0, 1]
    assert (result.exact, result.total) == (True, 8 + 3)
    first, second = (device.what_if for device in result.devices)
    assert first is not None
    assert second is not None
    assert first.out_of_memory is None
    assert second.out_of_memory is result.out_of_memory is not None
    assert result.peak_reserved == max(first.peak_reserved, second.peak_reserved)


def test_unknown_settings_and_gpus_are_refused() -> None:
    snapshot = run(growing).snapshot()
    with pytest.raises(SettingsError, match="nonsense"):
        replay(snapshot, "nonsense:1")
    with pytest.raises(GpuError, match="'A101' is not a GPU model"):
        replay(snapshot, gpu="A101")
