"""``torch.cuda.MemPool``, settings that change at run time, and pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.allocator import AllocatorError
from pytest_gpumem.values.errors import UnsupportedOperatorError

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


def pools() -> list[tuple[Any, int]]:
    return sorted(
        (each["segment_pool_id"], each["total_size"] // MIB)
        for each in torch.cuda.memory_snapshot()
    )


class TestMemPool:
    def test_a_scope_allocates_from_the_pool(self) -> None:
        with simulate("T4"):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                inside = mebibytes(30)
                assert pool.use_count() == 2
            outside = mebibytes(30)
            assert pools() == [((0, 0), 30), (pool.id, 30)]
            assert pool.id == (0, 1)
            assert pool.use_count() == 1
            assert [each["total_size"] for each in pool.snapshot()] == [30 * MIB]
            assert len(torch.cuda.memory_snapshot(pool.id)) == 1
            assert inside.is_cuda
            assert outside.is_cuda

    def test_memory_of_a_pool_is_released_with_the_object(self) -> None:
        with simulate("T4"):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                x = mebibytes(30)
            del x
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 30 * MIB
            del pool
            assert torch.cuda.memory_reserved() == 0

    def test_tensors_outlive_their_pool(self) -> None:
        with simulate("T4"):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                x = mebibytes(30)
            del pool
            assert torch.cuda.memory_reserved() == 30 * MIB
            del x
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0

    @pytest.mark.parametrize(
        ("version", "pool"), [("2.6", (0, 1)), ("2.7", (0, 1)), ("2.8", (0, 0)), ("2.13", (0, 0))]
    )
    def test_backward_allocates_from_the_pool_up_to_2_7(self, version: str, pool: Any) -> None:
        with simulate("T4", torch_version=version) as gpu:
            x = torch.ones(1 << 18, device="cuda", requires_grad=True)
            kept = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(kept):
                y = x.exp()
                loss = y.sum()
                before = len(gpu.trace)
                loss.backward()
            allocated = [e for e in gpu.trace[before:] if e.action == "alloc" and e.size == MIB]
            assert {event.pool_id for event in allocated} == {pool}

    @pytest.mark.parametrize(("version", "pool"), [("2.7", (0, 1)), ("2.8", (0, 0))])
    def test_other_threads_allocate_from_the_pool_up_to_2_7(self, version: str, pool: Any) -> None:
        with simulate("T4", torch_version=version):
            kept = torch.cuda.MemPool()
            made: list[torch.Tensor] = []
            with torch.cuda.use_mem_pool(kept):
                thread = threading.Thread(target=lambda: made.append(mebibytes(30)))
                thread.start()
                thread.join()
            assert pools() == [(pool, 30)]

    def test_a_pool_with_no_split_hands_out_whole_segments(self) -> None:
        with simulate("T4", torch_version="2.13"):
            pool = torch.cuda.MemPool(no_split=True)
            with torch.cuda.use_mem_pool(pool):
                x = mebibytes(4)
            assert torch.cuda.memory_allocated() == 20 * MIB
            assert x.is_cuda

    def test_a_pool_with_use_on_oom_lends_its_blocks(self) -> None:
        with simulate("T4", torch_version="2.13"):
            pool = torch.cuda.MemPool(use_on_oom=True)
            with torch.cuda.use_mem_pool(pool):
                mebibytes(12 << 10)
            x = mebibytes(10 << 10)
            assert [event["segment_pool_id"] for event in torch.cuda.memory_snapshot()] == [pool.id]
            assert x.is_cuda

    @pytest.mark.parametrize(("version", "option"), [("2.7", "use_on_oom"), ("2.9", "no_split")])
    def test_options_of_later_releases_are_refused(self, version: str, option: str) -> None:
        options: dict[str, Any] = {option: True}
        with (
            simulate("T4", torch_version=version),
            pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"),
        ):
            torch.cuda.MemPool(**options)

    def test_a_graph_may_use_a_mem_pool(self) -> None:
        with simulate("T4", torch_version="2.14"):
            pool = torch.cuda.MemPool()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=cast("Any", pool.id)):
                mebibytes(30)
            assert pool.use_count() == 2
            del graph
            assert pool.use_count() == 1
            assert pools() == [(pool.id, 30)]

    def test_statistics_of_each_pool_since_2_13(self) -> None:
        with simulate("T4", torch_version="2.13"):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                mebibytes(30)
            stats = torch.cuda.memory_stats()
            key = "reserved_bytes_by_private_pools.0_1.large_pool.current"
            assert stats[key] == 30 * MIB

    @pytest.mark.parametrize(
        "use",
        [
            lambda: torch.cuda.MemPool(object()),  # type: ignore[arg-type]  # any allocator
            lambda: torch.cuda.memory.CUDAPluggableAllocator("a.so", "malloc", "free"),
        ],
        ids=["pool", "pluggable"],
    )
    def test_custom_allocators_are_refused(self, use: Callable[[], object]) -> None:
        with (
            simulate("T4"),
            pytest.raises(UnsupportedOperatorError, match="past the simulated allocator"),
        ):
            use()


def memory_context(pool: torch.cuda.MemPool) -> object:
    return vars(torch.cuda)["MemPoolContext"](pool)


def active_pool() -> object:
    return vars(torch.cuda)["MemPoolContext"].active_pool()


def test_live_blocks_of_a_pool_are_compared() -> None:
    with simulate("T4"):
        pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            x, y = mebibytes(1), mebibytes(1)

        def check(*tensors: torch.Tensor) -> bool:
            live = {tensor.data_ptr() for tensor in tensors}
            return bool(torch._C._cuda_checkPoolLiveAllocations(0, pool, live))

        assert check(x, y)
        assert not check(x)
        del y
        assert check(x)
        other = mebibytes(1)
        assert not check(x, other)
        with pytest.raises(RuntimeError, match="Could not find pool of id"):
            torch._C._cuda_checkPoolLiveAllocations(0, (0, 99), set())


class TestCheckpoints:
    """``_cuda_getCheckpointState``: the blocks of a pool are restored."""

    core: Any = torch._C

    def test_live_blocks_are_restored_and_later_ones_freed(self) -> None:
        with simulate("T4", torch_version="2.14"):  # graphs of which have no random state
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                first, gap, last = mebibytes(2), mebibytes(3), mebibytes(4)
                del gap
            pool = graph.pool()
            before = torch.cuda.memory_snapshot(pool)
            state = self.core._cuda_getCheckpointState(0, pool)
            address = last.data_ptr()
            del last
            another = torch.cuda.CUDAGraph()
            with torch.cuda.graph(another, pool=pool):
                stale = mebibytes(3)
            keys = [one.untyped_storage()._cdata for one in (first, stale)]
            self.core._cuda_setCheckpointPoolState(0, state, keys, [])

            def shape(segments: Any) -> list[Any]:
                return [
                    (one["address"], [(each["size"], each["state"]) for each in one["blocks"]])
                    for one in segments
                ]

            assert shape(torch.cuda.memory_snapshot(pool)) == shape(before)
            assert torch.cuda.memory_allocated() == 6 * MIB
            del first, stale  # their memory is no longer theirs
            assert torch.cuda.memory_allocated() == 6 * MIB
            torch.cuda.caching_allocator_delete(address)
            assert torch.cuda.memory_allocated() == 2 * MIB

    def test_a_storage_at_an_address_may_own_it_later(self) -> None:
        with simulate("T4", torch_version="2.14"):  # graphs of which have no random state
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x = mebibytes(2)
            pool, address = graph.pool(), x.data_ptr()
            state = self.core._cuda_getCheckpointState(0, pool)
            del x
            storage = self.core._construct_storage_from_data_pointer(
                address, torch.device("cuda:0"), 2 * MIB
            )
            assert (storage.device, storage.data_ptr()) == (torch.device("cuda:0"), address)
            assert torch.cuda.memory_allocated() == 0
            self.core._cuda_setCheckpointPoolState(0, state, [], [storage._cdata])
            assert torch.cuda.memory_allocated() == 2 * MIB
            del storage
            assert torch.cuda.memory_allocated() == 0


def test_observers_are_told_before_a_full_device_raises() -> None:
    with simulate("T4"):
        told: list[tuple[int, int, int, int]] = []
        torch._C._cuda_attach_out_of_memory_observer(  # type: ignore[attr-defined]
            lambda *numbers: told.append(numbers)
        )
        kept = mebibytes(30)
        total = torch.cuda.get_device_properties(0).total_memory
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total, dtype=torch.uint8, device="cuda")
        # Device, bytes of the segment (in units of 2 MiB), of the device, and free ones.
        assert told == [(0, -(-total // (2 * MIB)) * 2 * MIB, total, total - 30 * MIB)]
        torch.cuda.set_per_process_memory_fraction(0.5)
        with pytest.raises(torch.OutOfMemoryError):
            mebibytes(10_000)
        assert told[1] == (0, 10_000 * MIB, told[1][2], total - 30 * MIB)
        assert told[1][2] in (total // 2, total // 2 + 1)
        del kept


@pytest.mark.skipif(
    not hasattr(torch.cuda, "MemPoolContext"), reason="MemPoolContext went with torch 2.8"
)
class TestMemPoolContext:
    """Up to 2.7: snapshots and ``empty_cache`` are about the pool of the innermost context."""

    def test_contexts_nest(self) -> None:
        with simulate("T4", torch_version="2.6"):
            first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
            assert active_pool() is None
            outer = memory_context(first)
            inner = memory_context(second)
            assert active_pool() is second
            del inner
            assert active_pool() is first
            del outer
            assert active_pool() is None

    @pytest.mark.parametrize(
        ("version", "seen", "kept"),
        [("2.7", [((0, 1), 30)], 60), ("2.8", [((0, 0), 30), ((0, 1), 30)], 30)],
    )
    def test_inside_a_context_snapshots_show_its_pool_alone(
        self, version: str, seen: list[tuple[Any, int]], kept: int
    ) -> None:
        with simulate("T4", torch_version=version):
            pool = torch.cuda.MemPool()
            mebibytes(30)
            with torch.cuda.use_mem_pool(pool):
                x = mebibytes(30)
                assert pools() == seen
                assert len(torch.cuda.memory._snapshot()["segments"]) == len(seen)
            assert len(pools()) == 2
            context = memory_context(pool)
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == kept * MIB
            del context
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 30 * MIB
            assert x.is_cuda


def set_settings(conf: str) -> None:
    # The function of torch.accelerator is younger than 2.6.
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(conf)
    else:
        torch.cuda.memory._set_allocator_settings(conf)


class TestSettings:
    def test_expandable_segments_turned_on_and_off(self) -> None:
        with simulate("T4") as gpu:
            set_settings("expandable_segments:True")
            x = mebibytes(4)
            set_settings("expandable_segments:False")
            y = mebibytes(4)
            assert [event.action for event in gpu.trace] == [
                "segment_map",
                "alloc",
                "segment_alloc",
                "alloc",
            ]
            assert (
                torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"] is False
            )
            assert x.is_cuda
            assert y.is_cuda

    @pytest.mark.parametrize(
        ("version", "error", "words"),
        [
            ("2.9", RuntimeError, "Unrecognized key 'foo' in Accelerator allocator config."),
            ("2.10", ValueError, "Unrecognized key 'foo' in Accelerator allocator config."),
        ],
    )
    def test_invalid_settings_raise_torchs_errors(
        self, version: str, error: type[Exception], words: str
    ) -> None:
        with simulate("T4", torch_version=version), pytest.raises(error, match=words):
            set_settings("foo:1")

    def test_settings_end_with_their_simulation(self) -> None:
        with simulate("T4"):
            set_settings("expandable_segments:True")
        with simulate("T4") as gpu:
            mebibytes(4)
            assert gpu.trace[0].action == "segment_alloc"


class TestWithoutCaching:
    def test_caching_allocator_enable_false_is_refused(self) -> None:
        with simulate("T4"):
            torch.cuda.caching_allocator_enable(True)
            with pytest.raises(UnsupportedOperatorError, match="past the simulated allocator"):
                torch.cuda.caching_allocator_enable(False)

    def test_a_variable_without_caching_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        with (
            pytest.raises(AllocatorError, match="that is simulated: unset it"),
            simulate("T4"),
        ):
            pass


class TestPinnedMemory:
    """Pinned memory, whose blocks are not counted: its statistics are refused."""

    @pytest.mark.skipif(
        not hasattr(torch.cuda, "host_memory_stats"), reason="this torch has no host_memory_stats"
    )
    @pytest.mark.parametrize(
        "name",
        [
            "host_memory_stats",
            "reset_peak_host_memory_stats",
            "reset_accumulated_host_memory_stats",
        ],
    )
    def test_statistics_are_refused(self, name: str) -> None:
        with (
            simulate("T4"),
            pytest.raises(UnsupportedOperatorError, match="run pytest --gpumem-device=dry"),
        ):
            getattr(torch.cuda, name)()

    def test_copies_keep_their_strides(self) -> None:
        with simulate("T4"):
            x = torch.arange(12).view(3, 4).t()
            pinned = x.pin_memory()
            assert torch.equal(pinned, x)
            assert pinned.stride() == (1, 4)
            assert pinned[1:].is_pinned()
            assert torch.empty(0).pin_memory().is_pinned()

    def test_the_result_of_a_non_blocking_download_is_pinned(self) -> None:
        with simulate("T4"):
            x = torch.ones(4, device="cuda")
            assert x.to("cpu", non_blocking=True).is_pinned()
            assert not x.cpu().is_pinned()

    def test_registered_memory_is_pinned(self) -> None:
        with simulate("T4"):
            runtime, x = torch.cuda.cudart(), torch.ones(20)
            assert runtime.cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0
            assert x.is_pinned()
            assert x[3:].is_pinned()
            assert runtime.cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 712  # already
            assert runtime.cudaHostUnregister(x.data_ptr()) == 0
            assert not x.is_pinned()
            assert runtime.cudaHostUnregister(x.data_ptr()) == 713  # not registered
