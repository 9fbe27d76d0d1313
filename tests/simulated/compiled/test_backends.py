"""Other backends of ``torch.compile`` than Inductor: their graphs run operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from pytest_gpumem import simulate

MIB = 1024 * 1024

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function, untyped."""
    result: Callable[..., Any] = torch.compile(function, backend=backend)
    return result


def gated(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * x.tanh() * x.cos()


def held_for_backward(backend: Any) -> int:
    """Return the MiB held between forward and backward of :func:`gated`; its input is 1 MiB."""
    with simulate("A100-40GB", compile="always") as gpu:
        run = compiled(gated, backend=backend)
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)
        y = run(x)
        held = torch.cuda.memory_allocated()
        y.sum().backward()
        assert x.grad is not None
        assert gpu.notes == ()
    return held // MIB


def forward(graph: GraphModule, inputs: Any) -> Any:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(graph.forward)


def with_all_saved() -> Any:
    """Partition as by default: every result of forward that backward uses is saved."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=forward)


def cut() -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(fw_compiler=forward, partition_fn=min_cut_rematerialization_partition)


def of_the_graph() -> Any:
    return lambda graph, inputs: graph.forward


@pytest.mark.parametrize(
    ("make", "held"),
    [
        # x, sigmoid, tanh, cos, their first product and y
        (of_the_graph, 6),
        (with_all_saved, 6),
        # x, sigmoid, tanh and y, from which cos and the product are recomputed
        (cut, 4),
        (lambda: "aot_eager", 4),
        # x and y, as Inductor does
        (lambda: "aot_eager_decomp_partition", 2),
    ],
)
def test_a_backend_decides_what_is_saved_for_backward(make: Callable[[], Any], held: int) -> None:
    assert held_for_backward(make()) == held


def test_a_graph_of_aot_eager_allocates_each_result_in_order() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        run = compiled(lambda x: x.sin().cos(), backend="aot_eager")
        x = torch.ones(256, 1024, device="cuda")
        before = len(gpu.trace)
        run(x)
        events = [
            event for event in gpu.trace[before:] if event.action in ("alloc", "free_requested")
        ]
        assert [event.size for event in events] == [MIB] * 4


def test_a_graph_of_aot_eager_computes_values() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        run = compiled(lambda x: x + 1, backend="aot_eager")
        assert run(torch.ones(3, device="cuda")).tolist() == [2.0, 2.0, 2.0]


def test_a_custom_backend_sees_cuda_tensors() -> None:
    seen: list[Any] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(graph: GraphModule, inputs: Any) -> Any:
            seen.extend(node.kwargs["device"] for node in graph.graph.nodes if node.kwargs)
            return forward(graph, inputs)

        seen.extend(value.device for value in inputs)
        return aot_autograd(fw_compiler=compiler)(graph, inputs)

    with simulate("A100-40GB", compile="always"):
        run = compiled(lambda x: x + torch.ones(3, device=x.device), backend=backend)
        assert run(torch.ones(3, device="cuda")).is_cuda
    assert seen == [torch.device("cuda:0")] * 2


def test_aot_function_partitions_a_graph_of_fake_tensors() -> None:
    """:func:`gated` saves as under ``torch.compile``, and fake tensors take no memory."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._subclasses.fake_tensor import FakeTensorMode

    yields: list[int] = []

    def compiler(graph: GraphModule, inputs: Any) -> Any:
        yields.append(len(graph.graph.output_node().all_input_nodes))
        return forward(graph, inputs)

    with simulate("A100-40GB") as gpu:
        x = FakeTensorMode().from_tensor(torch.ones(256, 1024, device="cuda", requires_grad=True))
        made: Any = compiler
        run = aot_function(gated, made, partition_fn=min_cut_rematerialization_partition)
        run(x).backward(torch.ones_like(x))
        assert x.grad is not None
        assert x.grad.is_cuda
        assert gpu.allocated == 0
    # y, x, sigmoid and tanh; the gradient of x
    assert yields == [4, 1]


def test_a_backend_that_calls_inductor_runs_its_wrapper() -> None:
    def backend(graph: GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    assert held_for_backward(backend) == 2


def failing(graph: GraphModule, inputs: Any) -> Any:
    raise ValueError("no such target")


def test_a_backend_that_fails_runs_eagerly_with_a_note() -> None:
    run = compiled(torch.sin, backend=failing)
    with simulate("A100-40GB") as gpu:
        assert run(torch.ones(3, device="cuda")).is_cuda
    assert gpu.notes[0].endswith("compiled code may allocate less: no such target")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's first one
def test_the_cudagraphs_backend_allocates_from_a_private_pool() -> None:
    with simulate("A100-40GB", compile="always"):
        run = compiled(lambda x: x.sin().sum(), backend="cudagraphs")
        x = torch.ones(256, 1024, device="cuda")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            run(x)
        pools = {tuple(each["segment_pool_id"]) for each in torch.cuda.memory_snapshot()}
        assert len(pools) > 1


def test_measured_costs_of_the_partitioner_become_flops() -> None:
    """An activation budget of one half, with three products of 1 MiB each."""
    from torch._functorch import config

    def products(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = torch.mm(x, weight).cos()
        return x.sum()

    held = {}
    for how in ("flops", "profile"):
        torch._dynamo.reset()
        with (
            simulate("A100-40GB", compile="always") as gpu,
            config.patch(
                activation_memory_budget=0.5, activation_memory_budget_runtime_estimator=how
            ),
        ):
            run = compiled(products, backend="aot_eager_decomp_partition")
            x = torch.ones(512, 512, device="cuda", requires_grad=True)
            weights = [torch.ones(512, 512, device="cuda", requires_grad=True) for _ in range(4)]
            run(x, weights)
            before = torch.cuda.memory_allocated()
            y = run(x, weights)
            held[how] = torch.cuda.memory_allocated() - before
            del y
            assert any("'profile' measures" in note for note in gpu.notes) == (how == "profile")
    assert held["flops"] == held["profile"]
