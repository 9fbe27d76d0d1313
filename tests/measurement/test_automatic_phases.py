"""Forward, backward and step become phases without being named."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from pytest_gpumem import simulate
from pytest_gpumem.garbage import paused
from pytest_gpumem.measurement.automatic_phases import AutomaticPhases
from pytest_gpumem.measurement.observer import MemoryObserver
from pytest_gpumem.measurement.phases import PhaseTracker
from pytest_gpumem.measurement.recorded import RecordedHistory
from pytest_gpumem.measurement.statistics import Bytes
from tests.fake_statistics import FakeStatistics


@pytest.fixture
def statistics() -> FakeStatistics:
    return FakeStatistics()


@pytest.fixture
def tracker(statistics: FakeStatistics) -> PhaseTracker:
    return PhaseTracker(statistics)


@pytest.fixture
def watching(tracker: PhaseTracker) -> Iterator[None]:
    with AutomaticPhases(tracker).watching():
        yield


def entries(tracker: PhaseTracker) -> dict[str, int]:
    return {name: phase.entered for name, phase in tracker.records(0, Bytes()).items()}


def parents(tracker: PhaseTracker) -> dict[str, str | None]:
    return {name: phase.parent for name, phase in tracker.records(0, Bytes()).items()}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))


@pytest.mark.parametrize("observed", [False, True])
def test_a_profiler_with_stacks_records_the_modules(tracker: PhaseTracker, observed: bool) -> None:
    observer = MemoryObserver(RecordedHistory()) if observed else None
    with AutomaticPhases(tracker, observer).watching():
        called = torch.nn.Module.__call__.__code__
        with profile(with_stack=True):
            net()(torch.ones(1, 2)).sum().backward()

    assert called.co_varnames[0] == "self"
    assert "self" not in called.co_freevars


@pytest.mark.usefixtures("watching")
def test_a_training_step_has_three_phases(tracker: PhaseTracker) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert entries(tracker) == {"forward": 2, "backward": 2, "step": 2}
    assert parents(tracker) == {"forward": None, "backward": None, "step": None}


@pytest.mark.usefixtures("watching")
def test_autograd_grad_is_backward(tracker: PhaseTracker) -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad((x * x).sum(), x)

    assert entries(tracker) == {"backward": 1}


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_belongs_to_backward(tracker: PhaseTracker, reentrant: bool) -> None:
    layer = nn.Linear(2, 2)

    class Checkpointed(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(layer, x, use_reentrant=reentrant)

    Checkpointed()(torch.ones(1, 2, requires_grad=True)).sum().backward()

    assert entries(tracker) == {"forward": 1, "backward": 1}


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_has_phases_of_its_own(tracker: PhaseTracker, by_name: bool) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    if by_name:
        optimizer.step(closure=closure)
    else:
        optimizer.step(closure)

    assert entries(tracker) == {"forward": 2, "backward": 2, "step": 1}
    assert set(parents(tracker).values()) == {None}


@pytest.mark.usefixtures("watching")
def test_a_closure_is_not_part_of_its_step(
    tracker: PhaseTracker, statistics: FakeStatistics
) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            statistics.use(20)
            closure()
            statistics.use(30)

    def closure() -> None:
        statistics.use(1000)  # neither forward nor backward
        with torch.no_grad():
            Uses(statistics, 200)(torch.ones(1))

    Optimizer(net().parameters(), lr=0.1).step(closure)

    records = tracker.records(0, Bytes())
    assert {name: phase.peak_allocated for name, phase in records.items()} == {
        "step": 30,
        "forward": 200,
    }


@pytest.mark.usefixtures("watching")
def test_a_step_with_a_closure_keeps_neither_its_loss_nor_its_optimizer() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        losses.append(weakref.ref(loss))
        return loss

    with paused():
        optimizer.step(closure)
        kept = weakref.ref(optimizer)
        del optimizer
        assert [kept(), losses[0]()] == [None, None]


@pytest.mark.usefixtures("watching")
def test_a_closure_that_raises_ends_its_step(tracker: PhaseTracker) -> None:
    def closure() -> float:
        raise RuntimeError

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError):
        optimizer.step(closure)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    assert entries(tracker) == {"step": 2, "forward": 1, "backward": 1}


@pytest.mark.usefixtures("watching")
def test_a_step_inside_backward_belongs_to_backward(tracker: PhaseTracker) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    (weight * 2).sum().backward()

    assert entries(tracker) == {"backward": 1}


@pytest.mark.usefixtures("watching")
def test_an_explicit_phase_absorbs_automatic_ones_of_its_name(tracker: PhaseTracker) -> None:
    model = net()
    with tracker.window("forward"):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))

    assert entries(tracker) == {"forward": 1}


@pytest.mark.usefixtures("watching")
def test_an_explicit_phase_of_another_name_is_the_parent(tracker: PhaseTracker) -> None:
    with tracker.window("train"):
        net()(torch.ones(1, 2))

    assert parents(tracker) == {"train": None, "forward": "train"}


class Uses(nn.Module):
    def __init__(self, statistics: FakeStatistics, size: int) -> None:
        super().__init__()
        self.statistics, self.size = statistics, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics.use(self.size)
        return x


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise RuntimeError
        return x


@pytest.mark.usefixtures("watching")
def test_a_forward_that_raises_ends_its_phase(tracker: PhaseTracker) -> None:
    module = FailsOnce()
    with pytest.raises(RuntimeError):
        module(torch.ones(1))
    module(torch.ones(1))

    assert entries(tracker) == {"forward": 2}


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError


@pytest.mark.usefixtures("watching")
def test_a_step_that_raises_ends_when_the_next_phase_begins(tracker: PhaseTracker) -> None:
    model = net()
    with pytest.raises(RuntimeError):
        FailingSGD(model.parameters(), lr=0.1).step()
    assert entries(tracker) == {}

    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert entries(tracker) == {"step": 2, "forward": 1, "backward": 1}


def test_a_step_that_raises_ends_when_watching_ends(tracker: PhaseTracker) -> None:
    with AutomaticPhases(tracker).watching(), pytest.raises(RuntimeError):
        FailingSGD(net().parameters(), lr=0.1).step()

    assert entries(tracker) == {"step": 1}


def test_torch_s_functions_are_restored_after_watching(tracker: PhaseTracker) -> None:
    before = nn.Module.__call__, vars(torch.autograd)["_engine_run_backward"]
    with pytest.raises(RuntimeError), AutomaticPhases(tracker).watching():
        assert nn.Module.__call__ is not before[0]
        raise RuntimeError

    assert (nn.Module.__call__, vars(torch.autograd)["_engine_run_backward"]) == before
    net()(torch.ones(1, 2)).sum().backward()
    assert entries(tracker) == {}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_lazy_module_is_watched_before_it_has_a_shape() -> None:
    with simulate("T4"):
        witness = MemoryObserver(RecordedHistory())
        witness.watch(nn.LazyLinear(4).cuda())
        assert witness.observations == []


@pytest.mark.parametrize("witnesses", [False, True])
def test_a_compiled_module_is_one_graph_and_one_phase(
    tracker: PhaseTracker, witnesses: bool
) -> None:
    """A wrapper around ``Module.__call__`` would become part of the graph, or break it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = net()
    witness = MemoryObserver(RecordedHistory()) if witnesses else None
    with AutomaticPhases(tracker, witness).watching():
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        compiled(torch.ones(1, 2))

        def double(x: torch.Tensor) -> Any:
            return model(x) * 2

        doubling: Any = torch.compile(double, backend=backend, fullgraph=True)
        doubling(torch.ones(1, 2))
    assert len(graphs) == 2
    assert entries(tracker) == {"forward": 1}


def test_gradients_that_a_compiler_traces_are_no_phase(tracker: PhaseTracker) -> None:
    """As the joint graph of a compiled function, traced at its first call (up to torch 2.12)."""
    x = torch.ones(2, requires_grad=True)
    with AutomaticPhases(tracker).watching():
        with tracing(TracingContext(None)):
            torch.autograd.grad(x.sum(), x)
        assert entries(tracker) == {}
        torch.autograd.grad(x.sum(), x)
    assert entries(tracker) == {"backward": 1}
