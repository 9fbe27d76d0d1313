"""Recompilation: Dynamo's guards hold from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_gpumem import simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


def activation(x: Tensor) -> Tensor:
    return x.sin()


class Activated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return activation(x)


def graphs_of(module: nn.Module, *, between: Callable[[], None] = lambda: None) -> int:
    """Return the number of graphs that three calls of the compiled ``module`` make."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    with simulate("A100-40GB", compile="always"):
        run: Any = torch.compile(module.cuda(), backend=count)
        x = torch.ones(2, 4, 8, device="cuda")
        for _ in range(3):
            run(x)
            between()
    return graphs


@pytest.mark.parametrize(
    "module",
    [
        # They ask torch.backends.mha and torch.overrides, functions that Dynamo looks into.
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout()),
        Activated(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_module_is_compiled_once(module: nn.Module) -> None:
    assert graphs_of(module) == 1


def test_a_rebound_function_of_the_user_is_recompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name of the user may refer to a function of torch."""

    def change() -> None:
        monkeypatch.setitem(globals(), "activation", nn.functional.softplus)

    assert graphs_of(Activated(), between=change) == 2
