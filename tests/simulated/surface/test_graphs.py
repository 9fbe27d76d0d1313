"""CUDA graphs: a capture runs the body once, and the graph keeps its memory."""

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


def new_graph() -> Any:
    """Return a graph, whose class has had more methods from release to release."""
    return torch.cuda.CUDAGraph()


def segments() -> list[tuple[Any, int]]:
    return sorted(
        (each["segment_pool_id"], each["total_size"] // MIB)
        for each in torch.cuda.memory_snapshot()
    )


def losses(*, captured: bool) -> list[float]:
    """Return the losses of three training steps with real values, after two of warm-up."""
    batches = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))
    with simulate("T4", real_values=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
        x = torch.zeros(6, 8, device="cuda")
        loss = torch.zeros((), device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            found = model(x).square().mean()
            found.backward()
            optimizer.step()
            loss.copy_(found.detach())

        for batch in batches[:2]:
            x.copy_(batch)
            step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        read = []
        for batch in batches[2:]:
            x.copy_(batch)
            graph.replay() if captured else step()
            read.append(loss.item())
        return read


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

    def test_memory_of_a_capture_is_in_the_graphs_pool(self) -> None:
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

    def test_temporaries_are_reused_in_the_capture_and_kept_for_replays(self) -> None:
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

    def test_the_beginning_of_a_capture_empties_the_cache(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            mebibytes(30)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                assert torch.cuda.memory_reserved() == 0

    def test_graphs_may_share_a_pool(self) -> None:
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

    def test_streams_that_wait_for_the_capture_are_captured_too(self) -> None:
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

    def test_streams_of_nodes_are_captured_with_their_backward(self) -> None:
        # The engine makes each node's stream wait, and memory for a stream that takes part in a
        # capture is the graph's: a cast that autocast caches may have been made on another stream.
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            side = torch.cuda.Stream()
            x = torch.ones(1 << 20, device="cuda", requires_grad=True)
            with torch.cuda.stream(side):
                y = x.exp()
            gradient = torch.ones_like(y)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                made = torch.autograd.grad(y * 2, y, gradient)[0]
                (slope,) = torch.autograd.grad(y, x, made)
                assert side.is_capturing()
            assert not side.is_capturing()
            owners = {
                block["address"]: segment["segment_pool_id"]
                for segment in torch.cuda.memory_snapshot()
                for block in segment["blocks"]
            }
            assert owners[slope.data_ptr()] == (1, 0)

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
        (lambda x: torch.ones(3, pin_memory=True).copy_(x, non_blocking=True), False),
        (lambda x: x.to("cpu", non_blocking=True), False),
    ],
)
def test_an_empty_graph_gives_a_warning(
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
    """A capture computes nothing; a replay computes the captured operators on current values."""

    def test_tensors_that_a_graph_does_not_write_stay_known(self) -> None:
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

    def test_a_replay_computes_the_captured_operators(self) -> None:
        with simulate("T4", real_values=True):
            x = torch.ones(4, device="cuda")
            count = torch.zeros(1, dtype=torch.int64, device="cuda")
            on_host = torch.empty(4, pin_memory=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                # Temporaries die in the capture, and the results are in parts of a tensor.
                y = torch.zeros(2, 4, device="cuda")
                y[1] = (x * 2).exp().log()
                total = y.sum() + torch.full((3,), 1.0, device="cuda").sum()
                count += 1
                on_host.copy_(x, non_blocking=True)
            for value in (3.0, 5.0):
                x.fill_(value)
                graph.replay()
                torch.testing.assert_close(y[1].cpu(), torch.full((4,), 2 * value))
                assert y[0].tolist() == [0, 0, 0, 0]
                assert total.item() == pytest.approx(8 * value + 3)
                assert on_host.tolist() == [value] * 4
            assert count.item() == 2

    def test_every_replay_draws_new_random_numbers(self) -> None:
        with simulate("T4", real_values=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                drawn = torch.rand(8, device="cuda")
            torch.cuda.manual_seed(3)
            graph.replay()
            first = drawn.clone()
            graph.replay()
            assert not torch.equal(drawn, first)
            torch.cuda.manual_seed(3)
            graph.replay()
            assert torch.equal(drawn, first)
            torch.cuda.manual_seed(3)
            assert torch.equal(torch.rand(8, device="cuda"), first)

    @pytest.mark.parametrize("shared", [False, True])
    def test_graphs_read_memory_that_other_graphs_have_written(self, shared: bool) -> None:
        """test_graph_three_successive of PyTorch 2.6."""
        with simulate("T4", real_values=True):
            a = torch.ones(1000, device="cuda")
            graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
            with torch.cuda.stream(torch.cuda.Stream()):
                graphs[0].capture_begin()
                b = a.clone()
                c, d = b + 1, b + 2
                graphs[0].capture_end()
                pool = (graphs[0].pool(),) if shared else ()
                graphs[1].capture_begin(*pool)
                e = c + 3
                del c
                graphs[1].capture_end()
                graphs[2].capture_begin(*pool)
                f = d + 4
                graphs[2].capture_end()
            for graph in graphs:
                graph.replay()
            assert (e[0].item(), f[0].item()) == (5, 7)
            for at in (0, 2, 1):
                graphs[at].replay()
            # In a shared pool "f" has the memory of "c".
            assert (e[0].item(), f[0].item()) == (10 if shared else 5, 7)
            graphs[0].replay()
            assert f[0].item() == (2 if shared else 7)

    def test_a_result_has_the_memory_of_a_larger_temporary(self) -> None:
        with simulate("T4", real_values=True):
            wide = torch.full((1024,), 2.0, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = wide * 2
                total = doubled.sum()
                del doubled
                narrow = wide[:512] * 3
                beside = wide[:512] * 4
            graph.replay()
            assert beside.data_ptr() - narrow.data_ptr() == 2048
            assert (narrow[0].item(), beside[0].item(), total.item()) == (6, 8, 4096)

    def test_a_replay_makes_overlapping_tensors_unknown(self) -> None:
        with simulate("T4", real_values=True):
            a = torch.ones(256, device="cuda")
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(first):
                small = [a + 1, a + 2]
            del small[0]
            pair = small
            del small
            with torch.cuda.graph(second, pool=first.pool()):
                pair.clear()
                large = torch.cat([a, a])
            first.replay()
            second.replay()
            assert large.tolist() == [1.0] * 512
            first.replay()
            with pytest.raises(UnknownValueError):
                large.sum().item()

    def test_a_storage_at_an_address_in_a_pool_has_its_values(self) -> None:
        with simulate("T4", real_values=True):
            a = torch.ones(256, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                b = a + 1
            graph.replay()
            pointer = b.untyped_storage().data_ptr()
            del b
            storage = torch._C._construct_storage_from_data_pointer(pointer, a.device, 1024)
            again = torch.empty(0, device="cuda").set_(storage, 0, (256,), (1,))
            assert again[0].item() == 2
            a.fill_(5)
            graph.replay()
            assert again[0].item() == 6

    def test_a_tensor_of_a_smaller_dtype_may_follow_at_an_address(self) -> None:
        with simulate("T4", real_values=True):
            x = torch.full((25,), 3.0, device="cuda")
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                total = (x + 1).sum()
                large = x > 2  # at the address of x + 1, and no multiple of its elements
            for value, expected in [(3.0, 100.0), (1.0, 50.0)]:
                x.fill_(value)
                graph.replay()
                assert total.item() == expected
                assert large.sum().item() == 25 * (value > 2)

    def test_operators_that_write_arguments_also_return_results(self) -> None:
        with simulate("T4", real_values=True):
            x = torch.randn(100, 4, device="cuda")
            norm = nn.BatchNorm1d(4).cuda()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = nn.functional.rrelu(x, training=True)
                z = norm(x)
            torch.cuda.manual_seed(5)
            graph.replay()
            assert norm.running_mean is not None
            assert torch.allclose(norm.running_mean, x.mean(0) / 10)
            torch.cuda.manual_seed(5)
            assert torch.equal(y, nn.functional.rrelu(x, training=True))
            assert torch.allclose(z, norm(x))

    def test_a_generator_draws_from_its_state_in_the_capture(self) -> None:
        with simulate("T4", real_values=True):
            default = torch.cuda.default_generators[0]
            own, other = default.graphsafe_get_state(), default.clone_state()
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(other)
            with torch.cuda.graph(graph):
                default.graphsafe_set_state(other)
                drawn = torch.rand(4, device="cuda", generator=default)
                default.graphsafe_set_state(own)
            before = own.get_offset()
            other.manual_seed(3)
            graph.replay()
            assert own.get_offset() == before
            default.manual_seed(3)
            assert torch.equal(drawn, torch.rand(4, device="cuda"))
            assert own.get_offset() == other.get_offset()

    def test_a_captured_training_step_has_the_losses_of_eager_code(self) -> None:
        assert losses(captured=True) == losses(captured=False)

    def test_replays_keep_no_values_of_freed_tensors(self) -> None:
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
    """Seed and offset of random operators, which are two small tensors."""

    @pytest.mark.parametrize("version", ["2.6", "2.11"])
    def test_up_to_2_11_captures_share_states_on_the_first_ones_stream(self, version: str) -> None:
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

    def test_since_2_14_states_are_allocated_behind_the_first_result(self) -> None:
        """Events of torch 2.15.0+cu132."""
        with simulate("T4", torch_version="2.15") as gpu:
            x = torch.ones(64, 64, device="cuda")
            graph, begin = torch.cuda.CUDAGraph(), len(gpu.trace)
            with torch.cuda.graph(graph):
                nn.functional.dropout(x, 0.1)
            events = [event.size for event in gpu.trace[begin:] if event.action == "alloc"]
            assert events == [64 * 64, 64 * 64 * 4, 8, 8]

    @pytest.mark.parametrize("version", ["2.12", "2.13"])
    def test_in_2_12_and_2_13_every_capture_has_its_own_states(self, version: str) -> None:
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
    def test_a_registered_generator_has_states_up_to_2_13(
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
    def test_generators_with_one_state_share_its_tensors(self, version: str) -> None:
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
    def test_since_2_14_the_first_random_operator_allocates_states(self, version: str) -> None:
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

    def test_since_2_14_states_are_active_until_a_replay_has_ended(self) -> None:
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

    @pytest.mark.parametrize(("version", "more"), [("2.11", 0), ("2.14", 1024), ("2.15", 1024)])
    def test_reading_or_setting_a_generator_allocates_its_states(
        self, version: str, more: int
    ) -> None:
        """As in checkpoints, which keep the state. Bytes and errors of torch 2.15.0+cu132."""
        with simulate("T4", torch_version=version):
            default, other = torch.cuda.default_generators[0], torch.Generator("cuda")
            state, graph = torch.cuda.get_rng_state(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                before = torch.cuda.memory_allocated()
                default.graphsafe_get_state()
                torch.cuda.manual_seed(default.initial_seed())
                assert torch.cuda.memory_allocated() == before
                torch.cuda.set_rng_state(state)
                assert torch.cuda.memory_allocated() == before + more
                torch.cuda.get_rng_state()
                assert torch.cuda.memory_allocated() == before + more
                other.get_state()
                assert torch.cuda.memory_allocated() == before + 2 * more
                for refused in (
                    *(default.get_offset, default.seed, default.clone_state),
                    *(lambda: default.set_offset(0), lambda: torch.Generator("cuda")),
                ):
                    with pytest.raises(RuntimeError, match="during CUDA graph capture"):
                        refused()
                with pytest.raises(RuntimeError, match="only if new seed is the same"):
                    torch.cuda.manual_seed(default.initial_seed() + 1)
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()  # draws nothing, and reads no state
            graph.reset()
            assert torch.cuda.memory_stats()["active_bytes.all.current"] == before

    def test_random_operators_outside_of_captures_allocate_no_states(self) -> None:
        with simulate("T4"):
            torch.rand(100, device="cuda")
            assert torch.cuda.memory_allocated() == 0


class TestWorkspaces:
    """A matrix product in a capture takes its workspace from the graph's pool."""

    @pytest.mark.parametrize(("version", "kept"), [("2.11", 20), ("2.12", 0)])
    def test_workspaces_end_with_the_graph_since_2_12(self, version: str, kept: int) -> None:
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
    """Errors of torch and of CUDA."""

    @pytest.mark.parametrize(
        ("use", "words"),
        [
            (lambda graph: graph.capture_begin(), "must be captured on a non-default stream"),
            # Since 2.15 a replay makes the graph ready first.
            (lambda graph: graph.replay(), "without a preceding successful|before calling instan"),
            (lambda graph: graph.pool(), r"pool\(\) without a preceding successful capture"),
            (lambda graph: graph.capture_end(), r"called before capture_begin\(\)"),
            (lambda graph: graph.instantiate(), r"capture_end\(\) must have been called"),
        ],
    )
    def test_calls_out_of_order_are_errors(self, use: Callable[[Any], object], words: str) -> None:
        with simulate("T4"), pytest.raises(RuntimeError, match=words):
            use(torch.cuda.CUDAGraph())

    def test_a_graph_cannot_capture_twice(self) -> None:
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
            lambda x: torch.ones(4, pin_memory=True).copy_(x),
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.cuda.current_stream().synchronize(),
            lambda x: torch.cuda.current_stream().record_event().synchronize(),
        ],
        ids=["item", "pinned", "device", "stream", "event"],
    )
    def test_waiting_in_a_capture_is_an_error(self, wait: Callable[[torch.Tensor], object]) -> None:
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

    @pytest.mark.parametrize(
        ("copy", "is_refused"),
        [
            (lambda x, host, pinned: host.cuda(non_blocking=True), True),
            (lambda x, host, pinned: x.copy_(host, non_blocking=True), True),
            (lambda x, host, pinned: host.copy_(x, non_blocking=True), True),
            (lambda x, host, pinned: x.copy_(pinned.t(), non_blocking=True), True),
            (lambda x, host, pinned: x.cpu(), True),
            (lambda x, host, pinned: torch.tensor([1, 2], device="cuda"), True),
            (lambda x, host, pinned: x[torch.tensor([1])], True),
            (lambda x, host, pinned: torch.linalg.svd(x), True),
            (lambda x, host, pinned: pinned.cuda(non_blocking=True), False),
            (lambda x, host, pinned: pinned.copy_(x, non_blocking=True), False),
            (lambda x, host, pinned: x.copy_(pinned.double(), non_blocking=True), True),
            (lambda x, host, pinned: pinned.to("cuda", torch.half, non_blocking=True), False),
            (lambda x, host, pinned: x.to("cpu", non_blocking=True), False),
            (lambda x, host, pinned: host[:0].cuda(), False),
        ],
    )
    def test_a_capture_refuses_pageable_memory(
        self, copy: Callable[..., object], is_refused: bool
    ) -> None:
        """As torch 2.15 on the dry device; the capture goes on."""
        with simulate("A100-40GB"):
            x, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
            pinned = host.pin_memory()
            refused = False
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x + 1
                try:
                    copy(x, host, pinned)
                except RuntimeError as error:
                    refused = "unless the CPU tensor is pinned" in str(error)
            assert refused == is_refused

    def test_pageable_copies_were_captured_before_2_11(self) -> None:
        with simulate("T4", torch_version="2.10"):
            host = torch.ones(4)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                assert host.cuda(non_blocking=True).shape == (4,)

    def test_captures_do_not_nest(self) -> None:
        with simulate("T4", torch_version=NO_RANDOM_STATE):
            outer, inner = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):
                outer.capture_begin()
                with pytest.raises(RuntimeError, match="cannot be performed in the present state"):
                    inner.capture_begin()
                outer.capture_end()

    @pytest.mark.parametrize("version", ["2.11", "2.13"])
    def test_up_to_2_13_the_generator_raises_the_error(self, version: str) -> None:
        with simulate("T4", torch_version=version), torch.cuda.stream(torch.cuda.Stream()):
            outer = torch.cuda.CUDAGraph()
            outer.capture_begin()
            with pytest.raises(RuntimeError, match="Cannot register the state during capturing"):
                torch.cuda.CUDAGraph().capture_begin()
            outer.capture_end()

    def test_a_capture_must_end_on_its_stream(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph.capture_begin()
            with pytest.raises(RuntimeError, match="must end on the same stream it began on"):
                graph.capture_end()
            with torch.cuda.stream(stream):
                graph.capture_end()

    def test_a_pool_in_use_by_a_capture_is_refused(self) -> None:
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

    def test_functions_of_the_drivers_graph_are_refused(self) -> None:
        with simulate("T4"):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                pass
            graph.instantiate()
            with pytest.raises(UnsupportedOperatorError, match="needs the driver's graph"):
                graph.raw_cuda_graph()
            with pytest.raises(UnsupportedOperatorError, match="needs the driver's graph"):
                graph.debug_dump(debug_path="graph.dot")

    @pytest.mark.skipif(torch.__version__ < "2.15", reason="graphs keep pools since torch 2.15")
    def test_a_pool_that_a_capture_uses_lives_as_long_as_the_graph(self) -> None:
        with simulate("T4"):
            pool, graph = torch.cuda.MemPool(), new_graph()
            with torch.cuda.graph(graph):
                own = mebibytes(30)
                with torch.cuda.use_mem_pool(pool):
                    used = mebibytes(40)
                assert graph.get_currently_capturing_graph() is graph
            assert graph.pools() == [graph.pool(), pool.id]
            del own, used, pool
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 70 * MIB
            graph.reset()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0

    @pytest.mark.skipif(torch.__version__ < "2.15", reason="hooks came with torch 2.15")
    def test_hooks_are_called_and_retained_objects_are_kept(self) -> None:
        with simulate("T4"):
            graph, called = new_graph(), list[str]()
            graph.register_capture_end_hook(lambda _: called.append("captured"))
            graph.register_replay_start_hook(lambda _: called.append("replayed"))
            with torch.cuda.graph(graph):
                torch.ones(1, device="cuda")
            graph.replay()
            assert called == ["captured", "replayed"]
            graph.retain_object(mebibytes(30))
            assert torch.cuda.memory_allocated() == 30 * MIB
            graph.reset()
            assert torch.cuda.memory_allocated() == 0

    @pytest.mark.skipif(torch.__version__ < "2.13", reason="the check came with torch 2.13")
    def test_a_replay_with_a_freed_input_is_an_error(self) -> None:
        with simulate("T4"):
            graph, x = torch.cuda.CUDAGraph(), mebibytes(30)
            with torch.cuda.graph(graph, check_input_liveness=True):
                x + 1
            graph.replay()
            del x
            with pytest.raises(RuntimeError, match=r"1 dead tensor"):
                graph.replay()

    @pytest.mark.skipif(
        not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"), reason="since torch 2.12"
    )
    def test_bodies_of_conditional_nodes_are_refused(self) -> None:
        with simulate("T4"):
            condition = torch.tensor(True, device="cuda")
            with (
                torch.cuda.graph(graph := new_graph()),
                pytest.raises(UnsupportedOperatorError, match="gpumem-device=dry"),
            ):
                graph.begin_capture_to_if_node(condition)


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

    def test_graphed_callables_compute_the_values_of_the_module(self) -> None:
        with simulate("T4", real_values=True):
            linear = nn.Linear(8, 4).cuda()
            x = torch.randn(5, 8, device="cuda", requires_grad=True)
            graphed = torch.cuda.make_graphed_callables(linear, (x.detach().requires_grad_(),))
            for _ in range(2):
                linear.zero_grad()
                out = graphed(x)
                assert isinstance(out, torch.Tensor)
                torch.testing.assert_close(out, x @ linear.weight.T + linear.bias)
                out.square().sum().backward()
                torch.testing.assert_close(linear.weight.grad, 2 * out.T @ x)
