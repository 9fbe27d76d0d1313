"""Torch's compilers are imported on first use; each test runs in a new process."""

from __future__ import annotations

import subprocess
import textwrap
from importlib.util import find_spec

import pytest
import torch

from pytest_gpumem.simulated.common.compiled_notes import FOLLOWED_SINCE
from tests.forked import quick

PRELUDE = """
import os
import sys
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton 3.9 warns where it is not set
import torch
import torch.nn.functional as F
from torch import nn
import pytest_gpumem

COMPILERS = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy"}
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__  # torch._disable_dynamo decorates it


def train(model, *shape):
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(*shape, device="cuda")).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(code: str, kind: str = "symbolic") -> None:
    """Run ``code`` in a process without torch's compilers; it must exit without output.

    In a ``"plain"`` process their dependencies are not imported either.
    """
    command = [str(quick(kind)), "-c", PRELUDE + textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True)
    # Torch's own line on a machine with CUDA's compiler and no GPU (torch/utils/cpp_extension.py).
    errors = [line for line in ran.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (ran.returncode, errors) == (0, [])


def test_a_training_step_imports_no_compiler() -> None:
    run(
        """
        assert not COMPILERS & set(sys.modules)
        with pytest_gpumem.simulate("A100-40GB") as gpu:
            layers = nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)
            train(nn.Sequential(*layers).cuda(), 16, 64)
            layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)
            train(nn.Sequential(*layers).cuda(), 2, 3, 16, 16)
            q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.half, requires_grad=True)
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
            words = torch.zeros(4, 8, dtype=torch.long, device="cuda")
            words_of = nn.Embedding(100, 16, device="cuda")
            logits = words_of(words) @ torch.ones(16, 100, device="cuda")
            F.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        assert gpu.peak_allocated > 0
        assert not COMPILERS & set(sys.modules)
        assert not hasattr(zero_grad, "__dynamo_disable")  # what torch has of a stand-in
        """,
        "plain",
    )


def test_compile_imports_the_unpatched_compilers() -> None:
    run(
        """
        with pytest_gpumem.simulate("A100-40GB"):
            model = nn.Linear(8, 8).cuda()
            train(model, 4, 8)
            assert getattr(zero_grad, "__dynamo_disable") is zero_grad
            with torch.device("cuda"):
                compiled = torch.compile(model)
                assert torch.empty(1).is_cuda
            train(compiled, 4, 8)
            assert getattr(zero_grad, "__dynamo_disable")._torchdynamo_disable
            torch._dynamo.reset()
            import torch._inductor.compile_fx
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor.lowering import lowerings
        assert CudaInterface.synchronize is torch.cuda.synchronize
        assert torch.empty in lowerings
        assert torch._dynamo.reset.__module__ == "torch._dynamo"
        train_on_cpu = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
        assert train_on_cpu(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
        """,
        "plain",
    )


@pytest.mark.skipif(
    torch.__version__ < FOLLOWED_SINCE, reason=f"compiled code is followed since {FOLLOWED_SINCE}"
)
def test_dynamo_imported_in_a_simulation_compiles_during_and_after_it() -> None:
    run(
        """
        backends = []
        def backend(graph, inputs):
            backends.append(graph)
            return graph.forward
        with pytest_gpumem.simulate("A100-40GB"):
            import torch._dynamo
            compiled = torch._dynamo.optimize(backend)(lambda x: x * 2)
            assert compiled(torch.ones(2, device="cuda")).is_cuda
            assert len(backends) == 1
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert len(backends) == 2
        """
    )


def test_a_second_thread_imports_dynamo_at_its_start() -> None:
    run(
        """
        import threading
        with pytest_gpumem.simulate("A100-40GB"):
            assert "torch._dynamo.eval_frame" not in sys.modules
            found = []
            look = lambda: found.append("torch._dynamo.eval_frame" in sys.modules)
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert found == [True]
        """
    )


def test_names_that_a_test_patches_survive_an_import() -> None:
    run("""
        with pytest_gpumem.simulate("T4"):
            torch.cuda.utilization = lambda: 7
            import torch.utils.show_pickle

            assert torch.cuda.utilization() == 7
            assert torch.cuda.is_available()
        assert not torch.cuda.is_available()
    """)


@pytest.mark.skipif(find_spec("expecttest") is None, reason="expecttest is not installed")
def test_torchs_testing_modules_find_the_gpu() -> None:
    run("""
        with pytest_gpumem.simulate("T4"):
            import torch._dynamo.test_case
            from torch.testing._internal.common_utils import TEST_CUDA
        assert TEST_CUDA
    """)
