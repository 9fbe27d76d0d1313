"""transformer-engine's checkpoint: the events are those of its own Python over its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.stand_ins.transformer_engine import MODULES

TE = MODULES["transformer_engine.pytorch"]
ROWS, HIDDEN, INNER = 64, 256, 1024
X, Y = ROWS * HIDDEN * 2, ROWS * INNER * 2
SUMS = ROWS * 4


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def mlp(activation: str = "relu") -> Any:
    return TE["LayerNormMLP"](HIDDEN, INNER, activation=activation, params_dtype=torch.bfloat16)


def rows() -> Tensor:
    shape = ROWS, HIDDEN
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_only_inputs_are_kept_and_all_is_made_again(gpu: Any) -> None:
    module, x = mlp(), rows()
    TE["checkpoint"](module, x)
    gpu.events()
    out = TE["checkpoint"](module, x)
    kept = [SUMS, SUMS, X, Y, -X, Y, -Y, X, -Y, -SUMS, -SUMS]
    assert gpu.events() == kept, "as without gradients"
    grad = torch.empty_like(out)
    gpu.events()
    out.backward(grad)
    assert gpu.events()[:6] == [SUMS, SUMS, X, Y, Y, X], "as with them"
    with pytest.raises(RuntimeError, match=r"not compatible with \.grad\(\)"):
        torch.autograd.grad(TE["checkpoint"](module, x), x, grad)


def test_without_reentry_what_is_saved_goes_and_comes_again(gpu: Any) -> None:
    module, x = mlp("gelu"), rows()
    TE["checkpoint"](module, x, use_reentrant=False)
    gpu.events()
    out = TE["checkpoint"](lambda given: module(given), x, use_reentrant=False)
    events = gpu.events()
    # GELU is the epilogue of a product then: nothing of it is compiled.
    assert [each for each in events if each > 0] == [SUMS, SUMS, X, Y, Y, X]
    assert sum(events) == X, "the output alone remains"
    out.backward(torch.empty_like(out))
    assert [each for each in gpu.events() if each > 0][1:7] == [SUMS, SUMS, X, Y, Y, X]


def test_functions_without_modules_of_the_library_are_torchs(gpu: Any) -> None:
    linear = nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = TE["checkpoint"](linear, rows())
    assert type(out.grad_fn).__name__ == "CheckpointFunctionBackward"


def test_what_is_not_covered_is_refused_by_name(gpu: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match="checkpoint in fp8"), TE["fp8_autocast"]():
        TE["checkpoint"](mlp(), rows())
    with pytest.raises(UnsupportedOperatorError, match=r"distribute_saved_activations=True"):
        TE["checkpoint"](mlp(), rows(), distribute_saved_activations=True)
    module = mlp().requires_grad_(False)
    out = TE["checkpoint"](module, rows())
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        TE["checkpoint"](lambda x: module(x.detach()), rows()).backward(torch.empty_like(out))
