"""Backward of compiled code, whose operators may be built in more than one way."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate

SIDE = 1024

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_where_with_a_number_keeps_its_gradient() -> None:
    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x, float("-inf")).exp()

    with simulate(compile="always"):
        x = torch.randn(SIDE, SIDE, device="cuda", requires_grad=True)
        mask = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.bool)
        torch.compile(chosen)(x, mask).sum().backward()
        assert x.grad is not None


def test_a_kernel_with_a_workspace_of_its_own_is_simulated() -> None:
    with simulate(compile="always"):
        norm = torch.nn.LayerNorm(SIDE).to("cuda")
        x = torch.randn(8 * SIDE, SIDE, device="cuda", requires_grad=True)
        torch.compile(norm)(x).sum().backward()
        assert x.grad is not None
        assert norm.weight.grad is not None


def test_compiling_a_function_again_makes_no_new_graph() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    with simulate(compile="always"):
        x = torch.randn(SIDE, device="cuda")
        graphs = torch._dynamo.utils.counters["stats"]
        before = graphs["unique_graphs"]
        for _ in range(3):
            torch.compile(double)(x)
        assert graphs["unique_graphs"] == before + 1
