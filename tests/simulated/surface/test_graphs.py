"""CUDA graphs: bodies run once, their memory stays with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

MIB = 1 << 20


pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
NO_RANDOM_STATE = "2.14"
"""A release whose captures allocate nothing but what is captured."""


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


def segments() -> list[tuple[Any, int]]:
    return sorted(
        (each["segment_pool_id"], each["total_size"] // MIB)
        for each in torch.cuda.memory_snapshot()
    )


class TestCapture:
    def test_the_body_runs_once_and_a_replay_allocates_nothing(self) -> None:
        with simulate("T4") as gpu:
            x = mebibytes(1)
            graph = torch.cuda.CUDAGraph()
            calls = 0
            with torch.cuda.graph(graph):
                calls += 1
                y = x + 1
            events = len(gpu.trace)
            for _ in range(3):
                graph.replay()
            assert (calls, len(gpu.trace)) == (1, events)
            assert y.shape == x.shape

    def test_memory_is_the_graphs_own(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            outside = mebibytes(30)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                inside = mebibytes(30)
            assert segments() == [((0, 0), 30), (graph.pool(), 30)]
            assert graph.pool() == (1, 0)
            assert torch.cuda.memory_allocated() == 60 * MIB
            del inside, outside
            torch.cuda.empty_cache()
            assert segments() == [((1, 0), 30)]

    def test_temporaries_are_shared_inside_and_kept_for_replays(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                mebibytes(30)
                mebibytes(30)
            assert torch.cuda.memory_allocated() == 0
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 30 * MIB

    @pytest.mark.parametrize("how", ["reset", "del"])
    def test_memory_is_released_with_the_graph(self, how: str) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x = mebibytes(30)
            if how == "reset":
                graph.reset()
            del graph
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 30 * MIB
            del x
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0

    def test_a_reset_graph_captures_again(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph()
            for number in (1, 2):
                with torch.cuda.graph(graph):
                    mebibytes(30)
                assert graph.pool() == (number, 0)
                graph.reset()

    def test_entering_empties_the_cache(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            mebibytes(30)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                assert torch.cuda.memory_reserved() == 0

    def test_graphs_share_a_pool(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
            with torch.cuda.graph(first):
                mebibytes(30)
            with torch.cuda.graph(second, pool=first.pool()):
                mebibytes(30)
            assert torch.cuda.memory_reserved() == 30 * MIB
            handle = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(third, pool=handle):
                mebibytes(30)
            assert segments() == [((0, 1), 30), ((1, 0), 30)]
            assert third.pool() == handle == (0, 1)
            del first
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 60 * MIB
            del second
            torch.cuda.empty_cache()
            assert segments() == [((0, 1), 30)]

    def test_streams_that_join_are_captured_too(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            side = torch.cuda.Stream()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                assert torch.cuda.is_current_stream_capturing()
                with torch.cuda.stream(side):
                    assert not torch.cuda.is_current_stream_capturing()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    assert torch.cuda.is_current_stream_capturing()
                    x = mebibytes(30)
                assert side.is_capturing()
                torch.cuda.current_stream().wait_stream(side)
            assert not side.is_capturing()
            assert segments() == [((1, 0), 30)]
            assert x.is_cuda

    def test_backward_is_captured_on_the_stream_of_its_forward(self) -> None:
        with simulate("T4", torch_version="2.6"):
            weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                weight.exp().sum().backward()
            grad = weight.grad
            assert grad is not None
            owners = {
                block["address"]: segment["segment_pool_id"]
                for segment in torch.cuda.memory_snapshot()
                for block in segment["blocks"]
            }
            assert owners[grad.data_ptr()] == (1, 0)

    def test_values_are_unknown_after_a_replay(self) -> None:
        with simulate("T4"):
            count = torch.zeros(1, dtype=torch.int64, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                count += 1
            graph.replay()
            graph.replay()
            with pytest.raises(UnknownValueError):
                count.item()


@pytest.mark.filterwarnings("always:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("body", "is_empty"),
    [
        (lambda x: None, True),
        (lambda x: torch.empty(3, device="cuda").view(3), True),
        (lambda x: x.add_(1), False),
        (lambda x: x.clone(), False),
    ],
)
def test_a_graph_without_nodes_is_warned_of(
    body: Callable[[torch.Tensor], object], is_empty: bool, recwarn: pytest.WarningsRecorder
) -> None:
    with simulate("T4"):
        x = torch.ones(3, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            body(x)
        x + 1
    assert [str(one.message).partition(".")[0] for one in recwarn] == (
        ["The CUDA Graph is empty"] if is_empty else []
    )


class TestValues:
    """A capture computes nothing, and a replay makes what the graph writes unknown."""

    def test_what_a_graph_does_not_write_stays_known(self) -> None:
        with simulate("T4"):
            count, steps = torch.zeros(2, dtype=torch.int64, device="cuda").split(1)
            other = torch.arange(3, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = other.sum()
            assert other.tolist() == [0, 1, 2]
            graph.replay()
            assert other.tolist() == [0, 1, 2]
            assert (count + steps).item() == 0
            with pytest.raises(UnknownValueError):
                total.item()

    def test_a_capture_writes_nothing(self) -> None:
        for real_values in (False, True):
            with simulate("T4", real_values=real_values):
                count = torch.zeros(1, dtype=torch.int64, device="cuda")
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    count += 1
                    made = count * 2
                assert count.item() == 0
                with pytest.raises(UnknownValueError):
                    made.item()

    def test_results_of_a_replay_are_those_of_the_dry_device_alone(self) -> None:
        with simulate("T4", real_values=True):
            x = torch.ones(256, device="cuda")
            other = torch.ones(256, device="cuda")
            graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x.mul_(2)
                y = x + 1
            with torch.cuda.graph(second, pool=graph.pool()):
                z = other + 1
            graph.replay()
            for unknown in (x, y, z):  # the third has memory of the same pool
                with pytest.raises(UnknownValueError, match=r"the replay of a CUDA graph \(but on"):
                    unknown.sum().item()
            assert other.sum().item() == 256

    def test_a_copy_to_the_host_in_a_graph_is_unknown(self) -> None:
        with simulate("T4", real_values=True):
            x = torch.ones(4, device="cuda")
            host = torch.zeros(4).pin_memory()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                host.copy_(x, non_blocking=True)
            with pytest.raises(UnknownValueError):
                host.sum().item()

    def test_replays_take_no_memory_for_values_of_dead_tensors(self) -> None:
        def events(real_values: bool) -> list[tuple[str, int, int]]:
            with simulate("T4", real_values=real_values) as gpu:
                graph = torch.cuda.CUDAGraph()
                x = torch.ones(1000, device="cuda")
                with torch.cuda.graph(graph):
                    y = (x + 1) * 2
                graph.replay()
                del y
                graph.replay()
                return [(event.action, event.size, event.addr) for event in gpu.trace]

        assert events(True) == events(False)


class TestRandomState:
    """Seed and offset of random operators live in two small tensors."""

    @pytest.mark.parametrize("version", ["2.6", "2.11"])
    def test_up_to_2_11_all_captures_share_them_on_the_stream_of_the_first(
        self, version: str
    ) -> None:
        with simulate("T4", torch_version=version):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pass
            (segment,) = torch.cuda.memory_snapshot()
            assert (segment["segment_pool_id"], segment["total_size"]) == ((0, 0), 2 * MIB)
            assert segment["stream"] == 3
            assert torch.cuda.memory_allocated() == 2 * 512
            another = torch.cuda.CUDAGraph()
            with torch.cuda.graph(another):
                pass
            assert torch.cuda.memory_allocated() == 2 * 512
            del graph
            assert torch.cuda.memory_allocated() == 2 * 512
            del another
            assert torch.cuda.memory_allocated() == 0

    @pytest.mark.parametrize("version", ["2.12", "2.13"])
    def test_in_2_12_and_2_13_every_capture_has_its_own_on_the_default_stream(
        self, version: str
    ) -> None:
        """test_graph_memory_stats_and_use_result_after_destroy_graph of PyTorch 2.13."""
        with simulate("T4", torch_version=version):
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                a = torch.ones(128, device="cuda")
                before = torch.cuda.memory_stats()
                graph.capture_begin()
                b = a.clone()
                for _ in range(5):
                    b = b.clone() + 1
                graph.capture_end()
            after = torch.cuda.memory_stats()
            # One block of "b", and two "from CUDAGraph's one-element rng seed and offset holders".
            for name, more in {
                "segment": 2,
                "reserved_bytes": 4 * MIB,
                "active": 3,
                "active_bytes": 512 + 1024,
            }.items():
                stat = f"{name}.small_pool.current"
                assert after[stat] - before[stat] == more, name
            another = torch.cuda.CUDAGraph()
            with torch.cuda.graph(another):
                pass
            assert torch.cuda.memory_allocated() == 2 * 512 + 2 * 1024
            del graph
            assert torch.cuda.memory_allocated() == 2 * 512 + 1024
            another.reset()
            assert torch.cuda.memory_allocated() == 2 * 512

    @pytest.mark.parametrize(
        ("version", "bytes_of_two"), [("2.11", 2048), ("2.13", 2048), ("2.14", 0)]
    )
    def test_a_generator_that_is_registered_has_them_until_2_13(
        self, version: str, bytes_of_two: int
    ) -> None:
        with simulate("T4", torch_version=version):
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(torch.Generator("cuda"))
            graph.register_generator_state(torch.cuda.default_generators[0])
            with torch.cuda.graph(graph):
                pass
            assert torch.cuda.memory_allocated() == bytes_of_two

    @pytest.mark.parametrize("version", ["2.6", "2.13"])
    def test_generators_that_share_a_state_share_them(self, version: str) -> None:
        with simulate("T4", torch_version=version):
            default = torch.cuda.default_generators[0]
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(default.graphsafe_get_state())
            graph.register_generator_state(default.clone_state())
            with torch.cuda.graph(graph):
                torch.rand(1, device="cuda")
            # Of the default one and of its copy.
            assert torch.cuda.memory_allocated() == 2 * 1024
            del graph
            assert torch.cuda.memory_allocated() == 0

    @pytest.mark.parametrize("version", ["2.14", "2.15"])
    def test_since_2_14_a_capture_has_them_at_its_first_random_operator(self, version: str) -> None:
        with simulate("T4", torch_version=version):
            graph = torch.cuda.CUDAGraph()
            x = torch.ones(100, device="cuda")
            with torch.cuda.graph(graph):
                assert torch.cuda.memory_allocated() == 512
                y = nn.functional.dropout(x)
                z = nn.functional.dropout(x)
            # Each dropout has its output and its mask.
            y, z = y.detach(), z.detach()
            assert torch.cuda.memory_allocated() == 512 + 2 * 512 + 2 * 512
            states = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == (0, 0)]
            assert [segment["stream"] for segment in states] == [0]
            del y, z
            graph.reset()
            assert torch.cuda.memory_allocated() == 512

    def test_since_2_14_they_stay_active_until_a_replay_on_another_stream_is_over(self) -> None:
        with simulate("T4", torch_version="2.14"):
            graph = torch.cuda.CUDAGraph()
            x = torch.ones(100, device="cuda")
            with torch.cuda.graph(graph):
                nn.functional.dropout(x)
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
            graph.reset()
            stats = torch.cuda.memory_stats()
            assert stats["allocated_bytes.all.current"] == 512
            assert stats["active_bytes.all.current"] == 512 + 1024
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_stats()["active_bytes.all.current"] == 512

    def test_outside_of_captures_there_are_none(self) -> None:
        with simulate("T4"):
            torch.rand(100, device="cuda")
            assert torch.cuda.memory_allocated() == 0


class TestWorkspaces:
    """A matrix product in a capture takes its workspace from the graph's pool."""

    @pytest.mark.parametrize(("version", "kept"), [("2.11", 20), ("2.12", 0)])
    def test_it_goes_with_the_graph_since_2_12(self, version: str, kept: int) -> None:
        with simulate("T4", torch_version=version):
            x = torch.ones(4, 4, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x @ x
            assert ((1, 0), 20) in segments()
            del graph
            torch.cuda.empty_cache()
            assert sum(size for pool, size in segments() if pool == (1, 0)) == kept


class TestMisuse:
    """torch's words, and CUDA's."""

    @pytest.mark.parametrize(
        ("use", "words"),
        [
            (lambda graph: graph.capture_begin(), "must be captured on a non-default stream"),
            (lambda graph: graph.replay(), "replay without a preceding successful capture"),
            (lambda graph: graph.pool(), r"pool\(\) without a preceding successful capture"),
            (lambda graph: graph.capture_end(), r"called before capture_begin\(\)"),
            (lambda graph: graph.instantiate(), r"capture_end\(\) must have been called"),
        ],
    )
    def test_out_of_order(self, use: Callable[[Any], object], words: str) -> None:
        with simulate("T4"), pytest.raises(RuntimeError, match=words):
            use(torch.cuda.CUDAGraph())

    def test_a_graph_captures_once(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pass
            with pytest.raises(RuntimeError, match="already owns a captured graph"):
                graph.capture_begin()

    @pytest.mark.parametrize(
        "wait",
        [
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.cuda.current_stream().synchronize(),
            lambda x: torch.cuda.current_stream().record_event().synchronize(),
        ],
        ids=["item", "cpu", "device", "stream", "event"],
    )
    def test_nobody_waits_in_a_capture(self, wait: Callable[[torch.Tensor], object]) -> None:
        with simulate("T4"):
            x = torch.randn(4, device="cuda")
            with (
                pytest.raises(RuntimeError, match="previous error during capture") as error,
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                wait(x)
            first = error.value.__context__
            assert "operation not permitted when stream is capturing" in str(first)
            assert not torch.cuda.is_current_stream_capturing()

    def test_captures_do_not_nest(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            outer, inner = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):
                outer.capture_begin()
                with pytest.raises(RuntimeError, match="cannot be performed in the present state"):
                    inner.capture_begin()
                outer.capture_end()

    @pytest.mark.parametrize("version", ["2.11", "2.13"])
    def test_up_to_2_13_the_generator_is_what_complains(self, version: str) -> None:
        with simulate("T4", torch_version=version), torch.cuda.stream(torch.cuda.Stream()):
            outer = torch.cuda.CUDAGraph()
            outer.capture_begin()
            with pytest.raises(RuntimeError, match="Cannot register the state during capturing"):
                torch.cuda.CUDAGraph().capture_begin()
            outer.capture_end()

    def test_a_capture_ends_where_it_began(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph.capture_begin()
            with pytest.raises(RuntimeError, match="must end on the same stream it began on"):
                graph.capture_end()
            with torch.cuda.stream(stream):
                graph.capture_end()

    def test_a_pool_that_is_being_recorded_to_is_taken(self) -> None:
        with simulate("T4"):
            handle = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.CUDAGraph().capture_begin(pool=handle)
            with (
                torch.cuda.stream(torch.cuda.Stream()),
                pytest.raises(RuntimeError, match="already recording to mempool_id"),
            ):
                torch.cuda.CUDAGraph().capture_begin(pool=handle)

    def test_the_cache_is_not_emptied_in_a_capture(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                with torch.cuda.stream(torch.cuda.default_stream()):
                    mebibytes(30)
                torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 30 * MIB

    def test_what_needs_the_drivers_graph_is_skipped(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                pass
            graph.instantiate()
            with pytest.raises(UnsupportedOperatorError, match="needs the driver's graph"):
                graph.raw_cuda_graph()


class TestGraphedCallables:
    def test_forward_and_backward_are_captured_and_replayed(self) -> None:
        with simulate("T4") as gpu:
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
            x = torch.randn(8, 64, device="cuda", requires_grad=True)
            graphed = torch.cuda.make_graphed_callables(model, (x,))
            pools = {pool for pool, _ in segments()}
            assert pools == {(0, 0), (0, 1)}
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            y = graphed(x)
            assert isinstance(y, torch.Tensor)
            reserved, events = torch.cuda.memory_reserved(), len(gpu.trace)
            y.sum().backward()
            assert torch.cuda.memory_reserved() == reserved
            # A replay has no activations to allocate: all that is new is small.
            assert max(event.size for event in gpu.trace[events:]) <= 64 * 64 * 4
            assert all(parameter.grad is not None for parameter in model.parameters())
