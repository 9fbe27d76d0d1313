"""transformer-engine's LayerNormMLP: the events are those of its own Python over its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.stand_ins.transformer_engine import MODULES

ROWS, HIDDEN, INNER = 64, 256, 1024
X, Y = ROWS * HIDDEN * 2, ROWS * INNER * 2
"""Activations before and between the products, in bfloat16."""
WEIGHT, BIAS_1, BIAS_2 = HIDDEN * INNER * 2, INNER * 2, HIDDEN * 2
SUMS = ROWS * 4
PARTS = 2 * (ROWS // 4) * HIDDEN * 4
"""Partial gradients of both of a norm's parameters: blocks of 4 rows, in float32."""


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def mlp(**options: Any) -> Any:
    options.setdefault("params_dtype", torch.bfloat16)
    return MODULES["transformer_engine.pytorch"]["LayerNormMLP"](HIDDEN, INNER, **options)


def rows(**options: Any) -> Tensor:
    options.setdefault("dtype", torch.bfloat16)
    return torch.empty((4, 16, HIDDEN), device="cuda", requires_grad=True, **options)


def region() -> Any:
    return MODULES["transformer_engine.pytorch"]["fp8_autocast"]()


def forward(gpu: Any, module: Any, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return what a second call makes: the first one makes the workspace of all products."""
    module(x)
    gpu.events()
    out = module(x)
    return out, gpu.events()


def backward(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_gelu_and_the_bias_are_fused_by_torchs_compiler(gpu: Any) -> None:
    module, x = mlp(), rows()
    assert gpu.events() == [*[BIAS_2] * 2, WEIGHT, BIAS_1, WEIGHT, BIAS_2, X]
    out, events = forward(gpu, module, x)
    assert events == [SUMS, SUMS, X, Y, Y, X], "norm, product without bias, activation, product"
    assert backward(gpu, out, x, *module.parameters()) == [
        *(Y, WEIGHT, BIAS_2, -Y),
        *(Y, BIAS_1, -Y),
        *(X, WEIGHT, -Y, -X),
        *(X, BIAS_2, BIAS_2, PARTS, -PARTS, -SUMS, -SUMS),
        *(-Y, -X),
    ]


@pytest.mark.parametrize(("activation", "width"), [("relu", 1), ("swiglu", 2)])
def test_other_activations_have_a_kernel(gpu: Any, activation: str, width: int) -> None:
    module, x = mlp(activation=activation), rows()
    out, events = forward(gpu, module, x)
    assert events == [SUMS, SUMS, X, width * Y, Y, X]
    assert backward(gpu, out, x, *module.parameters()) == [
        *(Y, WEIGHT, BIAS_2, -Y),
        *(width * Y, -width * Y),
        *(X, width * WEIGHT, width * BIAS_1, -width * Y, -X),
        *(X, BIAS_2, BIAS_2, PARTS, -PARTS, -SUMS, -SUMS),
        *(-Y, -X),
    ]


def test_without_the_compiler_gelu_is_the_epilogue_of_products(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", "0")
    module, x = mlp(), rows()
    out, events = forward(gpu, module, x)
    assert events == [SUMS, SUMS, X, Y, Y, X], "the product is written beside GELU of it"
    events = backward(gpu, out, x, *module.parameters())
    assert events[:3] == [Y, WEIGHT, BIAS_2]
    assert events.count(Y) == 1, "one product makes the gradient before GELU"


def test_what_nobody_differentiates_goes_at_once(gpu: Any) -> None:
    module, x = mlp(activation="silu"), rows()
    module(x)
    with torch.no_grad():
        assert gpu.of(lambda: module(x)) == [SUMS, SUMS, X, Y, -X, Y, -Y, X, -Y, -SUMS, -SUMS]
    module.fc1_weight.requires_grad_(False)
    assert gpu.of(lambda: module(x))[-2:] == [X, -X], "what is between norm and product"


NARROW = [4, ROWS * HIDDEN, ROWS * HIDDEN]
"""The inverse of a scale, a tensor in fp8, and its transpose."""
NARROW_WEIGHT = [4, HIDDEN * INNER, HIDDEN * INNER]
META = [6 * 4, 1024 * 6 * 4, 4 * 4, 1024 * 4 * 4]
"""Scales and 1,024 maxima of 3 tensors forward and 2 backward of each of two products."""


def test_in_fp8_the_activation_is_transposed_only_for_the_gradient(gpu: Any) -> None:
    module, x = mlp(activation="relu"), rows()
    with region():
        assert gpu.of(lambda: module(x))[:4] == META
        gpu.events()
        out = module(x)
        assert gpu.events() == [
            *(SUMS, SUMS, *NARROW, *NARROW_WEIGHT, *NARROW_WEIGHT, Y),
            *(4, ROWS * INNER, X),
        ]
    gpu.events()
    narrow = ROWS * INNER
    grad = [BIAS_2, 4, ROWS * HIDDEN, ROWS * HIDDEN, 2 * HIDDEN * 4, -2 * HIDDEN * 4]
    events = backward(gpu, out, x, *module.parameters())
    assert events[:8] == [*grad, Y, narrow], "the transpose comes before the weight's gradient"
    assert events[8:] == [
        *(WEIGHT, -narrow, -narrow),
        # The activation's gradient, in fp8 and transposed, that of the bias, and sums of 32 rows.
        *(4, narrow, narrow, BIAS_1, 2 * INNER * 4, -2 * INNER * 4, -Y),
        *(X, WEIGHT, -narrow, -narrow, -ROWS * HIDDEN, -ROWS * HIDDEN),
        *(X, BIAS_2, BIAS_2, PARTS, -PARTS, -SUMS, -SUMS),
        *events[31:],
    ]
    named = X + Y + 6 * 4 + 2 * ROWS * HIDDEN + 4 * HIDDEN * INNER
    assert sum(events[31:]) == -named, "then what the function named: products, scales and weights"


def test_in_fp8_a_gate_has_no_kernel_that_casts(gpu: Any) -> None:
    module, x = mlp(activation="swiglu", bias=False), rows()
    with region():
        out, _ = forward(gpu, module, x)
    events = backward(gpu, out, x, *module.parameters())
    at = events.index(2 * Y)
    narrow = ROWS * 2 * INNER
    sums = ROWS // 32 * 2 * INNER * 4
    assert events[at : at + 8] == [2 * Y, 2 * BIAS_1, 4, narrow, narrow, sums, -sums, -2 * Y]


def test_microbatches_share_both_weights(gpu: Any) -> None:
    module, x = mlp(activation="relu"), rows()
    with region():
        module(x, is_first_microbatch=True)
        events = gpu.of(lambda: module(x, is_first_microbatch=False))
        assert events == [SUMS, SUMS, *NARROW, Y, 4, ROWS * INNER, X]


def test_what_is_not_covered_is_refused_by_name(gpu: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"LayerNormMLP\(tp_size=2\)"):
        mlp(tp_size=2)
    with pytest.raises(UnsupportedOperatorError, match="seq_length and micro_batch_size"):
        mlp(seq_length=16, micro_batch_size=2)
    with pytest.raises(NotImplementedError, match="tanh is not supported"):
        mlp(activation="tanh")
