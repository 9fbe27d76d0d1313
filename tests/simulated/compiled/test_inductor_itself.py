"""Inductor, called with a graph that was made without ``torch.compile``."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gpumem import simulate
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
