"""``torch.cuda`` streams and events: the stream of an allocation, and the time of its free."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate

MIB = 1 << 20


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


def allocated_and_active() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocated_bytes.all.current"] // MIB, stats["active_bytes.all.current"] // MIB


class TestRouting:
    """The stream that an allocation belongs to."""

    def test_operators_allocate_on_the_current_stream(self) -> None:
        with simulate("T4") as gpu:
            side = torch.cuda.Stream()
            x = torch.ones(256, device="cuda")
            with torch.cuda.stream(side):
                x * 2
            x * 2
            streams = [event.stream for event in gpu.trace if event.action == "alloc"]
            assert streams == [0, side.cuda_stream, 0]

    def test_backward_runs_where_forward_ran(self) -> None:
        with simulate("T4") as gpu:
            side = torch.cuda.Stream()
            x = torch.ones(1 << 18, device="cuda", requires_grad=True)
            with torch.cuda.stream(side):
                y = x.exp()
            torch.cuda.current_stream().wait_stream(side)
            loss = y.log().sum()
            before = len(gpu.trace)
            loss.backward()

            def streams(size: int) -> list[int]:
                return [
                    event.stream
                    for event in gpu.trace[before:]
                    if event.action == "alloc" and event.size == size
                ]

            # Log's gradient on the default stream, exp's where exp ran.
            assert streams(MIB) == [0, side.cuda_stream]

    def test_backward_ignores_the_streams_of_other_threads(self) -> None:
        with simulate("T4"):
            of_main, of_thread = torch.cuda.Stream(), torch.cuda.Stream()
            seen: list[Any] = []

            def differentiate(stream: Any) -> None:
                with torch.cuda.stream(stream):
                    y = torch.ones(256, device="cuda", requires_grad=True).exp()
                    y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
                    y.sum().backward()

            def in_thread() -> None:
                assert torch.cuda.current_stream().cuda_stream == 0
                differentiate(of_thread)
                torch.cuda.set_stream(of_thread)

            x = torch.ones(256, device="cuda", requires_grad=True)
            with torch.cuda.stream(of_main):
                y = x.exp()
            y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
            y.sum().backward()
            assert seen == [of_thread, of_main]
            assert torch.cuda.current_stream().cuda_stream == 0

    def test_backward_ignores_the_stream_it_is_called_on(self) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(1 << 18, device="cuda", requires_grad=True)
            loss = x.exp().sum()
            with torch.cuda.stream(torch.cuda.Stream()):
                before = len(gpu.trace)
                loss.backward()
            sizes = [e for e in gpu.trace[before:] if e.action == "alloc" and e.size == MIB]
            assert {event.stream for event in sizes} == {0}

    def test_a_hook_may_choose_a_stream_of_its_own(self) -> None:
        with simulate("T4") as gpu:
            side = torch.cuda.Stream()
            x = torch.ones(1 << 18, device="cuda", requires_grad=True)
            y = x.exp()

            def double(gradient: torch.Tensor) -> torch.Tensor:
                with torch.cuda.stream(side):
                    return gradient * 2

            y.register_hook(double)
            before = len(gpu.trace)
            y.sum().backward()
            sizes = [e for e in gpu.trace[before:] if e.action == "alloc" and e.size == MIB]
            assert [event.stream for event in sizes].count(side.cuda_stream) == 1

    def test_each_stream_has_its_own_library_workspace(self) -> None:
        with simulate("T4", torch_version="2.6"):
            x = torch.ones(4, 4, device="cuda")
            for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    x @ x
            assert torch.cuda.memory_allocated() == 512 + 2 * 8_519_680

    def test_every_thread_has_a_current_stream_of_its_own(self) -> None:
        with simulate("T4"):
            seen: list[torch.cuda.Stream] = []
            with torch.cuda.stream(torch.cuda.Stream()):
                thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
                thread.start()
                thread.join()
            assert seen == [torch.cuda.default_stream()]

    def test_each_device_has_its_own_current_stream(self) -> None:
        with simulate("T4*2"):
            other = torch.cuda.Stream(device="cuda:1")
            assert other.device == torch.device("cuda", 1)
            with torch.cuda.stream(other):
                assert torch.cuda.current_device() == 1
                assert torch.cuda.current_stream() == other
                assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
            assert torch.cuda.current_device() == 0


class TestRecordStream:
    """A tensor freed while another stream uses it."""

    def test_a_block_stays_active_until_the_host_waits(self) -> None:
        with simulate("T4") as gpu:
            side = torch.cuda.Stream()
            x = mebibytes(4)
            address = x.data_ptr()
            x.record_stream(side)
            del x

            assert allocated_and_active() == (0, 4)
            assert mebibytes(4).data_ptr() != address
            side.synchronize()
            assert mebibytes(4).data_ptr() == address
            assert "free_completed" in [event.action for event in gpu.trace]

    @pytest.mark.parametrize(
        "wait",
        [
            lambda side: torch.cuda.synchronize(),
            lambda side: torch.cuda.empty_cache(),
            lambda side: side.query(),
            lambda side: side.record_event().synchronize(),
            lambda side: side.record_event().query(),
            lambda side: torch.accelerator.synchronize(),
        ],
        ids=["device", "empty_cache", "stream query", "event", "event query", "accelerator"],
    )
    def test_every_synchronization_completes_a_free(self, wait: Callable[[Any], object]) -> None:
        with simulate("T4"):
            side = torch.cuda.Stream()
            x = mebibytes(4)
            x.record_stream(side)
            del x
            wait(side)
            torch.empty(1, device="cuda")

            assert allocated_and_active() == (0, 0)

    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: x.to("cpu"),
            lambda x: torch.ones(3).cuda(),
            lambda x: x.copy_(torch.ones(3)),
            lambda x: torch.ones(3).pin_memory().copy_(x),
            lambda x: torch.ones(3).copy_(x, non_blocking=True),
            lambda x: torch.tensor([1.0, 2.0], device="cuda"),
        ],
        ids=[
            *("item", "cpu", "to", "from the host", "copy from the host", "copy to the host"),
            *("copy to pageable memory", "tensor of numbers"),
        ],
    )
    def test_a_copy_waits_for_what_the_current_stream_waited_for(
        self, read: Callable[[torch.Tensor], object]
    ) -> None:
        with simulate("T4"):
            side = torch.cuda.Stream()
            value = torch.randn(3, device="cuda")
            x, kept = mebibytes(4), mebibytes(4)
            for each in (x, kept):
                each.record_stream(side)
            del x
            read(value)
            mebibytes(1)
            assert allocated_and_active() == (4, 8)
            torch.cuda.current_stream().wait_stream(side)
            read(value)
            mebibytes(1)
            assert allocated_and_active() == (4, 4)

    def test_a_non_blocking_copy_completes_no_free(self) -> None:
        with simulate("T4"):
            side = torch.cuda.Stream()
            x = mebibytes(4)
            x.record_stream(side)
            del x
            torch.cuda.current_stream().wait_stream(side)
            torch.ones(3).pin_memory().to("cuda", non_blocking=True)
            torch.ones(3).pin_memory().copy_(torch.ones(3, device="cuda"), non_blocking=True)
            mebibytes(1)
            assert allocated_and_active() == (0, 4)

    def test_a_copy_allocates_before_it_waits(self) -> None:
        with simulate("T4"):
            side = torch.cuda.Stream()
            x = mebibytes(4)
            x.record_stream(side)
            del x
            torch.cuda.current_stream().wait_stream(side)
            copied = torch.ones(MIB // 4).cuda()
            assert allocated_and_active() == (1, 5)
            del copied
            mebibytes(1)
            assert allocated_and_active() == (0, 0)

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_gradient_that_passes_to_another_stream_is_used_there(self, waits: bool) -> None:
        with simulate("T4"):
            x = torch.ones(MIB // 4, device="cuda", requires_grad=True)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                y = x * 2
            z = y * 2
            z.backward(torch.ones_like(z))
            del y, z
            # The gradient of y was made on the default stream, and was used on the other one.
            assert allocated_and_active() == (2, 3)
            if waits:
                # Which has waited for the streams of the leaves.
                torch.cuda.current_stream().synchronize()
            mebibytes(1)
            assert allocated_and_active() == (2, 2 if waits else 3)

    def test_gradients_on_one_stream_are_free_at_once(self) -> None:
        with simulate("T4"):
            x = torch.ones(MIB // 4, device="cuda", requires_grad=True)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                z = x * 2 * 2
                z.backward(torch.ones_like(z))
                del z
            assert allocated_and_active() == (2, 2)

    def test_the_first_gradient_is_used_on_the_stream_of_its_node(self) -> None:
        with simulate("T4"):
            x = torch.ones(MIB // 4, device="cuda", requires_grad=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                z = x * 2
            z.backward(torch.ones_like(z))
            del z
            assert allocated_and_active() == (2, 3)

    def test_record_stream_accepts_empty_and_refuses_cpu_tensors(self) -> None:
        with simulate("T4"):
            torch.empty(0, device="cuda").record_stream(torch.cuda.Stream())
            with pytest.raises(RuntimeError, match="not implemented for tensors on the CPU"):
                torch.empty(1).record_stream(torch.cuda.Stream())

    def test_snapshots_show_a_block_that_awaits_its_free(self) -> None:
        with simulate("T4"):
            x = mebibytes(4)
            x.record_stream(torch.cuda.Stream())
            del x
            (segment,) = torch.cuda.memory_snapshot()
            assert segment["blocks"][0]["state"] == "active_pending_free"


class TestStream:
    def test_streams_repeat_after_thirty_two(self) -> None:
        with simulate("T4"):
            streams = [torch.cuda.Stream() for _ in range(33)]
            assert len(set(streams)) == 32
            assert streams[0] == streams[32]
            # The ids that torch assigns on a GPU.
            assert [stream.stream_id for stream in streams[:3]] == [3, 35, 67]

    @pytest.mark.parametrize(("asked", "given"), [(0, 0), (-1, -1), (-3, -3), (-9, -3), (2, 0)])
    def test_streams_have_priorities(self, asked: int, given: int) -> None:
        with simulate("T4"):
            assert torch.cuda.Stream(priority=asked).priority == given
            assert torch.cuda.Stream().priority_range() == (0, -3)

    def test_streams_of_two_priorities_differ(self) -> None:
        with simulate("T4"):
            assert torch.cuda.Stream() != torch.cuda.Stream(priority=-1)

    def test_an_external_stream_may_be_used(self) -> None:
        with simulate("T4") as gpu:
            external = torch.cuda.ExternalStream(0x1234560)
            with torch.cuda.stream(external):
                torch.ones(1, device="cuda")
            assert external.cuda_stream == 0x1234560
            assert gpu.trace[-1].stream == 0x1234560

    def test_generic_streams_and_events(self) -> None:
        with simulate("T4"):
            stream = torch.Stream(device="cuda:0")
            with stream:
                assert torch.cuda.current_stream() == stream
            assert torch.cuda.current_stream() != stream
            event = torch.Event(device="cuda", enable_timing=True)
            event.record(stream)
            assert event.query()
            assert isinstance(torch.cuda.Stream(), torch.Stream)

    def test_each_simulation_begins_with_the_first_stream(self) -> None:
        for _ in range(2):
            with simulate("T4"):
                assert torch.cuda.Stream().stream_id == 3


class TestEvent:
    def test_elapsed_time_of_two_events_is_a_number(self) -> None:
        with simulate("T4"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            end.record()
            end.synchronize()
            assert start.elapsed_time(end) >= 0

    def test_elapsed_time_needs_recorded_timing_events(self) -> None:
        with simulate("T4"):
            event, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
            with pytest.raises(ValueError, match="created with argument 'enable_timing=True'"):
                event.elapsed_time(timed)
            with pytest.raises(ValueError, match="must be recorded before"):
                timed.elapsed_time(timed)

    def test_elapsed_time_between_two_gpus_is_refused(self) -> None:
        with simulate("T4*2"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with torch.cuda.device(1):
                end.record()
            with pytest.raises(RuntimeError, match="invalid resource handle"):
                start.elapsed_time(end)

    def test_an_unrecorded_event_is_complete(self) -> None:
        with simulate("T4"):
            event = torch.cuda.Event()
            event.wait()
            event.synchronize()
            assert event.query()
            assert repr(event) == "<torch.cuda.Event uninitialized>"

    def test_an_event_belongs_to_the_device_it_was_recorded_on(self) -> None:
        with simulate("T4*2"):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(0))
            with pytest.raises(RuntimeError, match="Event device 0 does not match"):
                event.record(torch.cuda.current_stream(1))

    def test_a_cuda_event_is_a_torch_event(self) -> None:
        with simulate("T4"):
            event = torch.cuda.Event()
            assert isinstance(event, torch.Event)
            assert not isinstance(torch.Event("cuda"), torch.cuda.Event)
            assert repr(torch.Event("cuda")).startswith("torch.Event device_type=cuda")
            assert repr(event) == "<torch.cuda.Event uninitialized>"


def test_hooks_of_leaves_run_on_the_stream_that_used_the_leaf_first() -> None:
    with simulate("T4"):
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        seen = []
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.register_hook(lambda _: seen.append(torch.cuda.current_stream()))
        with torch.cuda.stream(first):
            copy = x.clone()  # its backward runs no operator
        with torch.cuda.stream(second):
            y = copy + x * 3
        y.sum().backward()
        assert seen == [first]


def test_synchronizing_operations_are_found() -> None:
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        assert torch.cuda.get_sync_debug_mode() == 2
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.sum().item()
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            x.cpu()
        torch.cuda.set_sync_debug_mode(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x.cpu()
