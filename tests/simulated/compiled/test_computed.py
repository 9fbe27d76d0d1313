"""Values of code under ``torch.compile`` with ``real_values=True``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.values.errors import UnknownValueError
from tests.pytest_project import Project

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function, untyped."""
    result: Callable[..., Any] = torch.compile(function, **options)
    return result


def train() -> list[torch.Tensor]:
    """Two steps of AdamW; return the losses, the last gradients, parameters and statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of = compiled(lambda x: model(x).square().mean())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(torch.randn(4, 3, 8, 8, device="cuda"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [*losses, *gradients, *model.parameters(), *model.buffers()]


def test_a_training_step_has_the_values_of_eager_code() -> None:
    """Allocations and frees are as without values; the wrapper comes from the cache then."""
    happened, values = [], []
    for real_values, how in ((False, "always"), (True, "always"), (True, "eager")):
        with simulate("A100-40GB", real_values=real_values, compile=how) as gpu:
            trained = train()
            happened.append([(event.action, event.size) for event in gpu.trace])
            if real_values:
                values.append([each.detach().cpu() for each in trained])
            if how == "always":
                assert gpu.notes == ()
    assert len(values[0]) == 2 + 5 + 5 + 3
    for computed, eager in zip(*values, strict=True):
        torch.testing.assert_close(computed, eager, rtol=1e-4, atol=1e-5)
    assert happened[0] == happened[1] != happened[2]


def test_rms_norm_has_the_values_of_eager_code() -> None:
    values = []
    for how in ("always", "eager"):
        with simulate("A100-40GB", real_values=True, compile=how):
            norm = nn.RMSNorm(8).cuda()
            x = torch.arange(32.0, device="cuda").view(4, 8).requires_grad_()
            compiled(norm)(x).square().sum().backward()
            assert x.grad is not None
            assert norm.weight.grad is not None
            values.append([x.grad.cpu(), norm.weight.grad.cpu()])
    for computed, eager in zip(*values, strict=True):
        torch.testing.assert_close(computed, eager)


def test_inputs_are_written_in_place() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        table = torch.zeros(3, 2, device="cuda")
        row = table[1]
        add = compiled(lambda row, x: row.add_(x) * 10)
        assert add(row, torch.ones(2, device="cuda")).tolist() == [10.0, 10.0]
        assert add(row, torch.ones(2, device="cuda")).tolist() == [20.0, 20.0]
        assert table.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


def test_uninitialised_memory_can_be_written() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        into = torch.empty(2, device="cuda")
        compiled(lambda into, x: into.copy_(x + 1))(into, torch.ones(2, device="cuda"))
        assert into.tolist() == [2.0, 2.0]


def test_backward_repeats_the_dropout_mask_of_forward() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        y = compiled(lambda x: functional.dropout(x, 0.5) * 3)(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(y, x.grad)
        assert y.unique().tolist() == [0.0, 6.0]
        assert 0.4 < (y == 0).float().mean().item() < 0.6


def test_other_sizes_are_computed_by_the_dynamic_graph() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        scaled = compiled(lambda x: (x + 1).view(-1) * x.shape[0])
        for rows in (2, 3, 5):
            assert scaled(torch.ones(rows, 2, device="cuda")).tolist() == [2.0 * rows] * rows * 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of the profiler
def test_a_compiled_optimizer_counts_its_steps_on_the_cpu_too() -> None:
    stepped = []
    for how in ("always", "eager"):
        with simulate("A100-40GB", real_values=True, compile=how):
            torch.manual_seed(0)
            layer = nn.Linear(4, 4).cuda()
            optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
            step = compiled(optimizer.step)
            for _ in range(3):
                optimizer.zero_grad()
                layer(torch.ones(2, 4, device="cuda")).square().sum().backward()
                step()
            assert [float(state["step"]) for state in optimizer.state.values()] == [3.0, 3.0]
            stepped.append(layer.weight.detach().cpu())
    torch.testing.assert_close(*stepped)


def test_flex_attention_has_the_values_of_eager_code() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with simulate("A100-40GB", real_values=True, compile="always"):
        given = [torch.randn(1, 2, 128, 64, device="cuda", requires_grad=True) for _ in range(3)]
        out = compiled(flex_attention)(*given)
        out.sum().backward()
        found = [out.detach().cpu(), *(each.grad.cpu() for each in given if each.grad is not None)]
        given = [each.detach().cpu().requires_grad_() for each in given]
    query, key, value = given
    out = functional.scaled_dot_product_attention(query, key, value)
    out.sum().backward()
    wanted = [out.detach(), *(each.grad for each in given if each.grad is not None)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_each_replay_of_a_cuda_graph_computes_compiled_code() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        x, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        run = compiled(lambda x, total: (total.add_(x), x * 2 + 1)[1])
        run(x, total)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x, total) * 10
        assert total.tolist() == [1.0, 1.0]
        x.fill_(3.0)
        graph.replay()
        graph.replay()
        assert total.tolist() == [7.0, 7.0]
        assert y.tolist() == [70.0, 70.0]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's first one
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_replays_of_inductors_cuda_graphs_compute(mode: str | None) -> None:
    """The first call warms up, the second is captured; events are as without values."""
    happened, values = [], []
    for real_values, how in ((False, "always"), (True, "always"), (True, "eager")):
        with simulate("A100-40GB", real_values=real_values, compile=how) as gpu:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU()).cuda()
            loss_of = compiled(lambda x: model(x).square().mean(), mode=mode)  # noqa: B023  # at once
            losses = []
            for _ in range(4):
                model.zero_grad()  # gradients of the last run, which this one overwrites
                torch.compiler.cudagraph_mark_step_begin()
                loss = loss_of(torch.randn(4, 8, device="cuda"))
                loss.backward()
                losses.append(loss.detach().clone())
            happened.append([(event.action, event.size) for event in gpu.trace])
            if real_values:
                kept = [*losses, *(each.grad for each in model.parameters()), *model.buffers()]
                values.append([each.cpu() for each in kept if each is not None])
            if how == "always":
                assert gpu.notes == ()
    assert len(values[0]) == 4 + 4 + 3
    for computed, eager in zip(*values, strict=True):
        torch.testing.assert_close(computed, eager, rtol=1e-4, atol=1e-5)
    assert happened[0] == happened[1]


@torch.library.custom_op("gpumem_computed::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))


def _remember(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.by = inputs[1]


scaled.register_autograd(
    lambda context, gradient: (scaled(gradient, context.by), None), setup_context=_remember
)


@torch.library.custom_op("gpumem_computed::add_into", mutates_args=("into",))
def add_into(into: torch.Tensor, x: torch.Tensor) -> None:
    into.add_(x)


@torch.library.custom_op("gpumem_computed::tripled", mutates_args=(), device_types="cuda")
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@tripled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("gpumem_computed::launching", mutates_args=())
def launching(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a Triton kernel fills on a GPU, and nothing on the CPU."""
    filled = torch.zeros_like(x)
    if not x.is_cuda:
        running[-1].kernel_wrote(filled)
    return filled


launching.register_fake(torch.empty_like)
running: list[SimulatedMachine] = []
"""The machine that a launch tells of."""


def test_custom_operators_that_run_on_the_cpu_are_computed() -> None:
    def run(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        add_into(into, x.detach())
        doubled: torch.Tensor = scaled(x.square(), 2.0)
        return doubled + 1

    with simulate("A100-40GB", real_values=True, compile="always"):
        x = torch.arange(3.0, device="cuda").requires_grad_()
        into = torch.ones(3, device="cuda")
        y = compiled(run)(x, into)
        y.sum().backward()
        assert y.tolist() == [1.0, 3.0, 9.0]
        assert into.tolist() == [1.0, 2.0, 3.0]
        assert x.grad is not None
        assert x.grad.tolist() == [0.0, 4.0, 8.0]


def test_a_custom_operator_for_gpus_alone_runs_eagerly() -> None:
    with simulate("A100-40GB", real_values=True) as gpu:
        y = compiled(lambda x: tripled(x.sin()) + 1)(torch.ones(3, device="cuda"))
        assert (
            "those of gpumem_computed.tripled.default cannot be computed on the CPU" in gpu.notes[0]
        )
        with pytest.raises(UnknownValueError, match="tripled"):
            y.tolist()


def test_a_kernel_launched_on_cpu_tensors_computes_nothing() -> None:
    (gpu,) = SimulatedGPU.machine("A100-40GB", real_values=True, compile="always")
    with gpu.active():
        running.append(gpu.simulation)
        y = compiled(lambda x: launching(x.sin()) + 1)(torch.ones(3, device="cuda"))
        with pytest.raises(UnknownValueError, match="launching"):
            y.tolist()


def test_operators_with_data_dependent_sizes_break_the_graph() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        positive = compiled(lambda x: (x + 1)[x > 0] * 2)
        assert positive(torch.tensor([1.0, -1.0, 2.0], device="cuda")).tolist() == [4.0, 6.0]


def test_an_index_out_of_range_is_an_error_as_on_a_gpu() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        pick = compiled(lambda x, at: x.sin()[at])
        with pytest.raises(IndexError, match="out of bounds"):
            pick(torch.ones(3, device="cuda"), torch.tensor([3], device="cuda"))


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (lambda x: x.sin().as_strided((2,), (2,)), {}, "aten.as_strided.default cannot be"),
        (lambda x: x.sin().cpu(), {}, "which copies to the CPU, cannot be computed on the CPU"),
    ],
)
def test_code_with_uncomputable_values_runs_eagerly_with_a_note(
    function: Callable[..., Any], options: dict[str, Any], reason: str
) -> None:
    with simulate("A100-40GB", real_values=True) as gpu:
        result = compiled(function, **options)(torch.zeros(4, device="cuda"))
        assert not result.any()
        assert reason in gpu.notes[0]
    with (
        simulate("A100-40GB", real_values=True, compile="always"),
        pytest.raises(BackendCompilerFailed, match=f"CompiledCodeError.*{reason}"),
    ):
        compiled(function, **options)(torch.zeros(4, device="cuda"))


class Strided(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].cos().as_strided((4,), (1,))


strided: Callable[[torch.Tensor], torch.Tensor] = Strided.apply


@pytest.mark.filterwarnings("ignore:.*Function.> should not be instantiated:DeprecationWarning")
def test_a_gradient_that_cannot_be_computed_is_unknown() -> None:
    with simulate("A100-40GB", real_values=True, compile="always"):
        x = torch.zeros(4, device="cuda", requires_grad=True)
        y = compiled(lambda x: strided(x))(x)
        assert y.tolist() == [0.0] * 4
        y.sum().backward()
        assert x.grad is not None
        with pytest.raises(UnknownValueError, match=r"because aten\.as_strided"):
            x.grad.tolist()


@pytest.mark.parametrize(
    "reading", ["losses.append(loss.item())", "if loss.item() < 0: raise ValueError"]
)
def test_a_test_that_reads_values_has_the_peak_of_compiled_code(
    project: Project, reading: str
) -> None:
    """Eager code would save 4 MiB each of x, sigmoid, tanh, cos, and make their products.

    Compiled code saves x, and allocates the sum, 512 bytes, with 8 KiB of partial sums.
    """
    project.write(
        test_it=f"""
        def gated(x):
            return (x.sigmoid() * x.tanh() * x.cos()).sum()

        @pytest.mark.gpumem(max="9MiB")
        def test_gate():
            losses = []
            x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
            for _ in range(2):
                loss = torch.compile(gated)(x)
                {reading}
                loss.backward()
                x.grad = None
        """
    )
    ran = project.run_apart("-rN", device="--gpumem-device=sim:A100-40GB")
    ran.assert_outcomes(passed=1)
    assert "eagerly" not in ran.stdout.str()
