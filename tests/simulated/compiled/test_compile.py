"""Code under ``torch.compile``: what Inductor's wrapper allocates on a simulated GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.device import parse_version
from pytest_gpumem.values.errors import UnknownValueError
from tests.pytest_project import Project

MIB = 1024 * 1024

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile``, which gives up its types."""
    result: Callable[..., Any] = torch.compile(function, **options)
    return result


def allocated(gpu: Any, since: int) -> list[int]:
    """The sizes of what was allocated after so many events."""
    return [event.size for event in gpu.trace[since:] if event.action == "alloc"]


def test_a_chain_of_elementwise_operators_takes_one_buffer() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(256, 1024, device="cuda")  # 1 MiB
        chain = compiled(lambda x: (x.sin().cos() + 1).exp())
        for _ in range(2):
            before = len(gpu.trace)
            y = chain(x)
            assert allocated(gpu, before) == [MIB]
            assert (y.device, y.shape) == (x.device, x.shape)
            del y
        assert gpu.peak_allocated == 2 * MIB
        assert gpu.notes == ()


def test_the_partitioner_decides_what_is_saved_for_backward() -> None:
    """Of three gates only the input is kept: the rest is computed again, in one kernel."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid() * x.tanh() * x.cos()

    held = {}
    for how in ("eager", "always"):
        with simulate("A100-40GB", compile=how):
            x = torch.ones(256, 1024, device="cuda", requires_grad=True)
            y = compiled(gated)(x)
            held[how] = torch.cuda.memory_allocated() // MIB
            y.sum().backward()
            assert x.grad is not None
    # Eager: x, sigmoid, tanh, cos, their first product and y.
    assert held == {"eager": 6, "always": 2}


def test_autocast_casts_within_the_graph() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        layer = nn.Linear(1024, 1024, bias=False, device="cuda")
        x = torch.ones(512, 1024, device="cuda")
        run = compiled(layer)
        before = len(gpu.trace)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = run(x)
        assert y.dtype is torch.bfloat16
        # Casts of the input and of the weight, the result; cuBLAS's workspace beside them.
        assert sorted(allocated(gpu, before))[:3] == [MIB, MIB, 2 * MIB]


def test_a_norm_by_root_mean_squares_keeps_its_input_and_a_number_for_each_row() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        norm = nn.RMSNorm(1024).cuda()
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)
        run = compiled(lambda x: norm(x).sin())
        before = len(gpu.trace)
        y = run(x)
        assert allocated(gpu, before) == [256 * 4, MIB]
        held = torch.cuda.memory_allocated()
        y.backward(torch.ones_like(y))
        # Gradients of the input and of the weight come, what was kept for them goes.
        assert torch.cuda.memory_allocated() - held == MIB + 1024 * 4 - 256 * 4


def test_a_fused_cell_without_shapes_breaks_the_graph() -> None:
    """``_thnn_fused_gru_cell``: its gates, its workspace of five and its state are as eager."""
    taken = {}
    for how in ("always", "eager"):
        with simulate("A100-40GB", compile=how) as gpu:
            cell, x = nn.GRUCell(64, 128).cuda(), torch.ones(8, 64, device="cuda")
            before = len(gpu.trace)
            compiled(cell)(x)
            taken[how] = allocated(gpu, before)
    assert 8 * 5 * 128 * 4 in taken["always"]
    assert taken["always"] == taken["eager"]


def test_what_breaks_the_graph_runs_eagerly_between_its_parts() -> None:
    seen: list[torch.device] = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        seen.append(torch.ones(3, device="cuda").device)
        torch._dynamo.graph_break()
        return y + torch.zeros(256, 1024, device="cuda")

    with simulate("A100-40GB", compile="always"):
        x = torch.ones(256, 1024, device="cuda")
        assert compiled(broken)(x).is_cuda
    assert seen == [torch.device("cuda:0")]


def test_torchs_functions_are_known_also_where_they_were_looked_up_while_replaced() -> None:
    with simulate("A100-40GB", compile="always"):
        compiled(torch.sin)(torch.ones(4, device="cuda"))
    torch._dynamo.trace_rules.clear_lru_cache()  # as init_process_group does
    with simulate("A100-40GB", compile="always") as gpu:
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        chain = compiled(lambda x: x + torch.zeros(1024, device="cuda"), fullgraph=True)
        assert chain(torch.ones(256, 1024, device="cuda")).is_cuda
        assert gpu.notes == ()


@pytest.mark.parametrize("rows", [16, 48])
def test_another_size_is_compiled_for_sizes_that_vary(rows: int) -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        double = compiled(lambda x: x.sin() * 2)
        double(torch.ones(32, 1024, device="cuda"))
        x = torch.ones(rows, 1024, device="cuda")
        before = len(gpu.trace)
        double(x)
        assert allocated(gpu, before) == [rows * 1024 * 4]


def test_numbers_that_vary_are_traced_again_where_the_compiler_asks_for_it() -> None:
    """It learns late that a rate of dropout is a constant, and tells Dynamo by an exception."""
    with simulate("A100-40GB", compile="always") as gpu:
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.1)).cuda()
        run = compiled(Scaled(net), dynamic=True)
        for rows in (64, 128, 96):
            run(torch.ones(rows, 256, device="cuda")).sum().backward()
        assert gpu.notes == ()


class Scaled(nn.Module):
    """Has a number that is not constant."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rate = inner, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.rate
        return nn.functional.dropout(result, self.rate)


def test_a_function_that_was_compiled_before_is_followed_in_each_simulation() -> None:
    chain = compiled(lambda x: x.sin().cos())
    for model in ("A100-40GB", "T4"):
        with simulate(model, compile="always") as gpu:
            x = torch.ones(256, 1024, device="cuda")
            before = len(gpu.trace)
            chain(x)
            assert allocated(gpu, before) == [MIB]


def test_each_model_decides_by_its_own_multiprocessors() -> None:
    """A sum of few long rows is split over what the GPU has, so its partial sums differ."""
    partial: dict[str, list[int]] = {}
    for model in ("A100-40GB", "T4", "A100-40GB"):
        with simulate(model, compile="always") as gpu:
            x = torch.ones(4, 1 << 20, device="cuda")
            before = len(gpu.trace)
            compiled(lambda x: x.sum(1))(x)
            sizes = allocated(gpu, before)
            assert partial.setdefault(model, sizes) == sizes
    assert partial["A100-40GB"] != partial["T4"]


def test_what_concerns_the_cpu_alone_is_computed() -> None:
    with simulate("A100-40GB", compile="always"):
        assert compiled(lambda x: x + 1)(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_what_compiled_code_writes_to_is_known_no_longer() -> None:
    with simulate("A100-40GB", compile="always"):
        count = torch.zeros(3, device="cuda")
        assert count.tolist() == [0.0, 0.0, 0.0]
        compiled(lambda count: count.add_(torch.rand(3, device="cuda")))(count)
        with pytest.raises(UnknownValueError, match="depends on a value"):
            count.tolist()


def test_flex_attention_makes_no_matrix_of_scores() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with simulate("A100-40GB", compile="always") as gpu:
        q = torch.ones(2, 8, 512, 64, device="cuda", requires_grad=True)  # 2 MiB
        out: Any = compiled(flex_attention)(q, q, q, score_mod=lambda score, b, h, i, j: score + i)
        out.sum().backward()
        assert q.grad is not None
        # The scores alone would be 2 * 8 * 512 * 512 * 4 bytes, 16 MiB.
        assert gpu.peak_allocated < 14 * MIB


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's first one
def test_cuda_graphs_keep_what_they_use_in_a_pool_of_their_own() -> None:
    with simulate("A100-40GB", compile="always"):
        chain = compiled(lambda x: x.sin().sum(), mode="reduce-overhead")
        x = torch.ones(256, 1024, device="cuda")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            chain(x)
        pools = {tuple(each["segment_pool_id"]) for each in torch.cuda.memory_snapshot()}
        assert len(pools) > 1


def test_a_compiled_optimizer_makes_its_state_on_the_gpu() -> None:
    """Both averages and the count of steps of two parameters, each 512 bytes after rounding.

    The first step makes them as a capturable optimizer does.
    """
    with simulate("A100-40GB", compile="always") as gpu:
        layer = nn.Linear(8, 16).cuda()
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(4, 8, device="cuda")).sum().backward()
        before = gpu.allocated
        compiled(optimizer.step)()
        assert all(each.is_cuda for state in optimizer.state.values() for each in state.values())
        assert gpu.allocated - before == 2 * 3 * 512
        up_to_2_13 = parse_version(None) < (2, 14)
        assert optimizer.param_groups[0]["capturable"] is up_to_2_13


def test_a_compiled_optimizer_has_its_counts_of_steps_on_the_gpu() -> None:
    """Dynamo moves them there where it finds them: one block of 512 bytes for each parameter."""
    with simulate("A100-40GB", compile="always") as gpu:
        layer = nn.Linear(16, 16).cuda()
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(4, 16, device="cuda")).sum().backward()
        optimizer.step()
        steps = [state["step"] for state in optimizer.state.values()]
        assert [step.is_cuda for step in steps] == [False, False]
        before = gpu.allocated
        compiled(optimizer.step)()
        steps = [state["step"] for state in optimizer.state.values()]
        assert [step.is_cuda for step in steps] == [True, True]
        assert gpu.allocated - before == 2 * 512


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's first one
def test_cuda_graphs_keep_their_last_result_and_what_its_gradient_leads_to() -> None:
    """The next run returns the same tensor (torch/_inductor/cudagraph_trees.py): it is kept."""
    with simulate("A100-40GB", compile="always"):
        chain = compiled(lambda x: x.sin().cos(), mode="reduce-overhead")
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)  # 1 MiB
        for _ in range(3):
            x.grad = None  # the next run overwrites what the graph of backward has made
            torch.compiler.cudagraph_mark_step_begin()
            y = chain(x)
            y.sum().backward()
        del x, y
        gc.collect()
        assert torch.cuda.memory_allocated() // MIB == 1
        torch._dynamo.reset()
        gc.collect()
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's first one
def test_a_number_on_the_cpu_is_copied_from_pinned_memory() -> None:
    """Graphs read no memory of the CPU, so Inductor copies before them."""
    with simulate("A100-40GB", compile="always") as gpu:
        scaled = compiled(lambda x, scale: x * scale, mode="reduce-overhead")
        x, scale = torch.ones(256, 1024, device="cuda"), torch.ones(())
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert scaled(x, scale).is_cuda
        assert gpu.notes == ()


def test_what_is_written_is_what_a_gpu_gets() -> None:
    """Tests of users look into it."""
    from torch._inductor.utils import run_and_get_code

    with simulate("A100-40GB", compile="always"):
        x = torch.ones(256, 1024, device="cuda")
        _, (code,) = run_and_get_code(compiled(lambda x: x.sin().cos()), x)
    assert "buf0 = empty_strided_cuda((256, 1024), (1024, 1), torch.float32)\n" in code


# What is not followed.


def test_it_can_be_left_out() -> None:
    with simulate("A100-40GB", compile="eager") as gpu:
        x = torch.ones(256, 1024, device="cuda")
        before = len(gpu.trace)
        compiled(lambda x: x.sin().cos())(x)
        assert allocated(gpu, before) == [MIB, MIB]
    (note,) = gpu.notes
    assert note.startswith("torch.compile at ")
    assert note.endswith(
        "runs eagerly on a simulated GPU, as it was asked to: compiled code allocates less"
    )


def test_an_unknown_way_is_refused() -> None:
    sentence = "compile='never': write one of 'auto', 'always', 'eager'"
    with pytest.raises(ValueError, match=sentence), simulate("A100-40GB", compile="never"):
        pass


def test_a_backend_with_a_runtime_of_its_own_runs_eagerly_or_is_refused() -> None:
    sentence = "runs eagerly on a simulated GPU, where backend 'tvm' is not followed"
    with simulate("A100-40GB") as gpu:
        compiled(lambda x: x.sin(), backend="tvm")(torch.ones(3, device="cuda"))
        assert sentence in gpu.notes[0]
    with simulate("A100-40GB", compile="always"):
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=sentence):
            compiled(lambda x: x.sin(), backend="tvm")(x)


def broken_lowering(*_: Any, **__: Any) -> Any:
    raise ValueError("no such kernel")


def test_what_inductor_cannot_do_runs_eagerly_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", broken_lowering)
    with simulate("A100-40GB") as gpu:
        x = torch.ones(256, 1024, device="cuda")
        before = len(gpu.trace)
        assert compiled(lambda x: x.tan().cos())(x).is_cuda
        assert allocated(gpu, before) == [MIB, MIB]
    assert "could not be followed on a simulated GPU, so it runs eagerly" in gpu.notes[0]
    assert gpu.notes[0].endswith("compiled code may allocate less: no such kernel")


def test_what_inductor_cannot_do_is_refused_where_all_is_to_be_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", broken_lowering)
    with simulate("A100-40GB", compile="always"):
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"not be followed .*: no such kernel"):
            compiled(lambda x: x.tan().sin())(x)


def convolution(format: torch.memory_format) -> nn.Module:
    layer: Any = nn.Conv2d(8, 16, 3, padding=1, device="cuda")
    moved: nn.Module = layer.to(memory_format=format)
    return moved


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_other_sizes_than_before(format: torch.memory_format) -> None:
    """The sizes become symbols, and what is written still has the format of its operands."""
    with simulate("A100-40GB", compile="always") as gpu:
        convolve = compiled(convolution(format))
        for batch in (4, 6, 8):
            x = torch.ones(batch, 8, 64, 64, device="cuda").to(memory_format=format)
            before = len(gpu.trace)
            y = convolve(x)
            assert batch * 16 * 64 * 64 * 4 in allocated(gpu, before)
            assert y.is_contiguous(memory_format=format)
            y.sum().backward()


def test_modules_of_users_are_followed_where_phases_are_measured(
    project: Project,
) -> None:
    """What finds the phase ``forward`` stands around ``Module.__call__``, that Dynamo starts from.

    Input and result are 4 MiB each, and fused there is nothing between them.
    """
    project.write(
        test_it="""
        class Gate(torch.nn.Module):
            def forward(self, x):
                return x.sigmoid() * x.tanh() * x.cos()

        @pytest.mark.gpumem(max="8MiB")
        def test_gate():
            torch.compile(Gate())(torch.ones(1024, 1024, device="cuda"))
        """
    )
    ran = project.run_apart("--gpumem-sim-compile=always", device="--gpumem-device=sim:A100-40GB")
    ran.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("gpu", "rows", "padded"),
    [("A100-40GB", 16, False), ("A100-40GB", 2048, True), ("L4", 16, False), ("L4", 2048, True)],
)
def test_a_product_that_does_not_wait_for_memory_gets_padded_rows(
    gpu: str, rows: int, padded: bool
) -> None:
    """7 columns are missing to rows of 16 bytes: the weight is copied with 50,264 of them."""
    with simulate(gpu, compile="always") as simulated, torch.no_grad():
        layer: Any = nn.Linear(768, 50257, bias=False, device="cuda", dtype=torch.bfloat16)
        x = torch.ones(rows, 768, device="cuda", dtype=torch.bfloat16)
        before = len(simulated.trace)
        compiled(layer)(x)
        assert (768 * 50264 * 2 in allocated(simulated, before)) == padded


def test_what_torch_traces_for_its_own_tools_is_heard_by_nobody_else() -> None:
    """pytest would show hundreds of empty lines with a failure."""
    heard: list[logging.LogRecord] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    listening = Listening()
    log = logging.getLogger("torch.__trace")
    log.addHandler(listening)
    try:
        with simulate("A100-40GB", compile="always"):
            x = torch.ones(256, 1024, device="cuda", requires_grad=True)
            compiled(lambda x: x.sigmoid() * x.tanh())(x).sum().backward()
    finally:
        log.removeHandler(listening)
    assert heard == []
