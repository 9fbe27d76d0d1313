"""Inductor, called with a graph that was made without ``torch.compile``."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

import pytest
import torch
from torch._inductor import scheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import GPUS
from tests.forked import quick

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)

MIB = 1024 * 1024


def one_mib() -> torch.Tensor:
    return torch.ones(256, 1024, device="cuda")


def three(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.sin().cos().tanh(),)


def chain() -> GraphModule:
    """Three operators: three results eagerly, one if they are fused."""
    return make_fx(three)(one_mib())


def taken(gpu: Any, run: Any, *args: Any) -> list[int]:
    before = len(gpu.trace)
    result = run(*args)
    assert result[0].is_cuda
    return [event.size for event in gpu.trace[before:] if event.action == "alloc"]


def test_a_graph_on_fake_tensors_becomes_a_wrapper() -> None:
    with simulate("A100-40GB") as gpu:
        from torch._inductor.compile_fx import compile_fx_inner

        graph = chain()
        with FakeTensorMode():
            inputs = [one_mib()]
        fused: Any = compile_fx_inner(graph, inputs)
        x = one_mib()
        assert taken(gpu, lambda: fused([x])) == [MIB]


def test_a_graph_is_compiled_with_what_autograd_makes_of_it() -> None:
    with simulate("A100-40GB") as gpu:
        fused: Any = torch._inductor.compile(chain(), [one_mib()])
        assert taken(gpu, fused, one_mib()) == [MIB]


ASIDE = """
import threading, time
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from pytest_gpumem import simulate

with simulate("A100-40GB") as gpu:
    over = threading.Event()
    threading.Thread(target=over.wait).start()
    x = torch.ones(256, 1024, device="cuda")
    fused = torch._inductor.compile(make_fx(lambda x: (x.sin().cos().tanh(),))(x), [x])
    before = len(gpu.trace)
    fused(x)
    over.set()
    print([event.size for event in gpu.trace[before:] if event.action == "alloc"])
"""


def test_inductor_may_be_imported_beside_another_thread() -> None:
    """The thread is like that of tqdm's progress bars."""
    command = [str(quick("symbolic")), "-c", ASIDE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == f"[{MIB}]\n", ran.stderr


def test_aot_function_may_compile_by_inductor() -> None:
    with simulate("A100-40GB") as gpu:
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        run = aot_function(
            three,
            compile_fx_inner,
            decompositions=select_decomp_table(),
        )
        x = one_mib().requires_grad_()
        run(x)[0].backward(one_mib())
        assert x.grad is not None
        assert x.grad.is_cuda
        assert gpu.notes == ()


def test_autotuning_at_compile_time_is_not_measured() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        run = torch.compile(three, options={"triton.autotune_at_compile_time": True})
        x = one_mib()
        run(x)
        assert taken(gpu, run, x) == [MIB]
        assert any("chooses kernels by their speed" in note for note in gpu.notes)


def test_a_convolution_that_would_be_tuned_is_a_matrix_product() -> None:
    """With that setting one of single pixels is lowered to another operator, of cuBLAS."""
    with simulate("A100-40GB", compile="always") as gpu, torch.no_grad():
        layer = torch.nn.Conv2d(8, 16, 1, bias=False).cuda()
        x = torch.randn(4, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        workspace = 8_519_680
        for mode, has_workspace in (("default", False), ("max-autotune-no-cudagraphs", True)):
            run = torch.compile(lambda x, layer=layer: (layer(x),), mode=mode)
            assert (workspace in taken(gpu, run, x)) is has_workspace
            torch._dynamo.reset()


@pytest.mark.skipif(
    not hasattr(scheduler, "_REINDEXING_FUSION_LAUNCH_OVERHEAD_NS"), reason="torch 2.15 or later"
)
@pytest.mark.parametrize(("model", "is_fused"), [("A100-40GB", True), ("mine", False)])
def test_kernels_are_fused_by_the_bandwidth_of_the_memory(model: str, is_fused: bool) -> None:
    """A norm whose result is read in another order: a launch costs more than it saves."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        x = functional.layer_norm(x, (48,))
        by_channel = x.unflatten(2, (3, 16)).transpose(1, 2)
        return (functional.conv2d(by_channel.to(memory_format=torch.channels_last), kernel),)

    known = GPUS["A100-40GB"]
    mine = dataclasses.replace(known, name=model, memory_gb_per_second=0)
    with simulate(known if is_fused else mine, compile="always") as gpu, torch.no_grad():
        kernel = torch.randn(3, 3, 3, 3, device="cuda")
        x = torch.randn(4, 16, 96, device="cuda")[..., :48]
        sizes = taken(gpu, torch.compile(run), x)
        assert (4 * 4 * 16 not in sizes) is is_fused


WHOLE = """
import threading

from pytest_gpumem import simulate

BEFORE
with simulate("A100-40GB") as gpu:
    from torch._inductor.compile_fx import compile_fx_inner
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(256, 1024, device="cuda")
    fused = compile_fx_inner(
        make_fx(lambda x: (x.sin().cos(),))(x), [FakeTensorMode().from_tensor(x)]
    )
    assert fused([x])[0].is_cuda
    assert torch._inductor.compile(make_fx(lambda x: (x.cos(),))(x), [x])(x)[0].is_cuda
# Inductor's bar of progress has a thread; helpers that compile kernels would have more.
assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "tqdm_monitor"}
"""


@pytest.mark.parametrize(
    "before", ["", "import torch._dynamo", "import torch._inductor.compile_fx"]
)
def test_inductor_may_be_imported_before_or_in_the_simulation(before: str) -> None:
    """A new process: Inductor is imported once, and nothing has been compiled before."""
    python = quick("full" if "_inductor" in before else "symbolic")
    ran = subprocess.run(
        [python, "-c", WHOLE.replace("BEFORE", before)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
