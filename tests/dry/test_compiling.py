"""Compilers on the dry device, and what they share with the code that is compiled."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.dry.conftest import Run


def test_compilers_have_a_pool_but_not_the_state_of_optimizers(dry_run: Run) -> None:
    """Dynamo makes it while it traces a step, and memory of the model's may be free for it.

    Steps that Adagrad counts on the host move then. Torch 2.6 cannot leave a pool for a moment.
    """
    found = dry_run(
        """
from contextlib import nullcontext
from types import SimpleNamespace
from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.variables.optimizer import OptimizerVariable
from pytest_gpumem.dry.compiling import separate_pool, skip_tuning

weight = torch.nn.Parameter(torch.empty(1 << 20, device="cuda"))
weight.grad = torch.zeros_like(weight)
optimizer, counting = torch.optim.AdamW([weight]), torch.optim.Adagrad([weight])
TorchPatcher.patch()  # gives each kind of optimizer a function of its own
with skip_tuning(nullcontext), separate_pool():
    optimizer.step()
    OptimizerVariable.move_step_if_cpu(SimpleNamespace(value=counting))
    constant = torch.empty(1 << 20, device="cuda")

def pool_of(tensor):
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return list(segment["segment_pool_id"])

found["state"] = pool_of(optimizer.state[weight]["exp_avg"])
found["step"] = pool_of(counting.state[weight]["step"])
found["constant"] = pool_of(constant)
del constant
torch.cuda.empty_cache()
found["pools behind"] = [one["segment_pool_id"] for one in torch.cuda.memory_snapshot()]
found["may leave"] = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
"""
    )
    assert (found["state"] == found["step"] == [0, 0]) is found["may leave"]
    assert found["constant"] != [0, 0]
    if found["may leave"]:
        assert set(map(tuple, found["pools behind"])) == {(0, 0)}


@pytest.mark.skipif(find_spec("triton") is None, reason="torch.compile needs Triton for a GPU")
def test_a_kernel_that_would_be_measured_is_that_of_the_library(dry_run: Run) -> None:
    """Times are all equal, so a template fused with what follows would seem to be faster."""
    found = dry_run(
        """
from contextlib import nullcontext
from pytest_gpumem.dry.compiling import skip_tuning

with skip_tuning(nullcontext):
    from torch._inductor.utils import run_and_get_code
    given = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(
        lambda x: torch.addmm(x[0], x, x).float().relu(), mode="max-autotune-no-cudagraphs"
    )
    _, (code,) = run_and_get_code(run, given)
found["library"] = "extern_kernels.addmm(" in code
found["template"] = "triton_tem_" in code
"""
    )
    assert found == {"library": True, "template": False}


def test_compilers_use_a_pool_that_receives_allocations_already(dry_run: Run) -> None:
    """As in a warm-up of a CUDA graph: torch 2.11 ends the process where a pool ends meanwhile."""
    found = dry_run(
        """
from contextlib import nullcontext
from pytest_gpumem.dry.compiling import separate_pool, skip_tuning

def pool_of(tensor):
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return list(segment["segment_pool_id"])

pool = torch.cuda.MemPool()
with skip_tuning(nullcontext):
    with torch.cuda.use_mem_pool(pool), separate_pool():
        inside = torch.empty(1 << 20, device="cuda")
    with separate_pool():
        behind = torch.empty(1 << 20, device="cuda")
found["inside"] = pool_of(inside) == list(pool.id)
found["behind"] = pool_of(behind) in ([0, 0], list(pool.id))
"""
    )
    assert found == {"inside": True, "behind": False}
