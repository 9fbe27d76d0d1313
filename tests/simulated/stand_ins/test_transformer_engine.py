"""transformer-engine: its modules allocate what transformer_engine/ of 2.8 does."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.transformer_engine import MODULES
from pytest_gpumem.simulated.stand_ins.transformer_engine.plans import workspace

ROWS, INNER, OUTER = 40, 256, 512
X, Y = ROWS * INNER * 2, ROWS * OUTER * 2
WEIGHT, BIAS, GAMMA = OUTER * INNER * 2, OUTER * 2, INNER * 2
SUMS = ROWS * 4
"""Mean, or inverse of the deviation, in float32."""
PARTS = 10 * INNER * 4
"""Partial gradients of a norm's weight: ceil(40 rows / 4 warps) blocks of float32."""


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def module(name: str, *sizes: int, **options: Any) -> Any:
    dtype = options.pop("params_dtype", torch.bfloat16)
    return MODULES["transformer_engine.pytorch"][name](*sizes, params_dtype=dtype, **options)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)


def gradients(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "nbytes"), [("A100-40GB", 4 << 20), ("H100", (32 << 20) + 1024), ("B200", 33555456)]
)
def test_all_products_share_one_workspace(on: Any, model: str, nbytes: int) -> None:
    gpu = on(model)
    linear, x = module("Linear", INNER, OUTER), made(4, 10, INNER)
    assert gpu.events() == [WEIGHT, BIAS, X]
    assert gpu.of(lambda: linear(x)) == [nbytes, Y]
    assert gpu.of(lambda: linear(x)) == [Y]


def test_a_linear_layer_keeps_its_input_and_makes_three_gradients(gpu: Any) -> None:
    linear, x = module("Linear", INNER, OUTER), made(4, 10, INNER)
    out = linear(x)
    assert out.shape == (4, 10, OUTER)
    assert gradients(gpu, out, x, *linear.parameters()) == [X, WEIGHT, BIAS]
    out = linear(x.detach())
    assert gradients(gpu, out, *linear.parameters()) == [WEIGHT, BIAS], "no input gradient"
    linear.requires_grad_(False)
    del out
    before = torch.cuda.memory_allocated()
    out = linear(x.clone())
    assert torch.cuda.memory_allocated() - before == Y, "an input that nobody needs is not kept"
    assert gradients(gpu, out, x)[0] == X


def test_under_autocast_copies_of_weights_live_as_long_as_the_graph(gpu: Any) -> None:
    linear = module("Linear", INNER, OUTER, params_dtype=torch.float32)
    x = made(4, 10, INNER, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        linear(x)
        assert gpu.of(lambda: linear(x))[-4:] == [X, WEIGHT, BIAS, Y]
        out = linear(x)
    assert gradients(gpu, out, x, *linear.parameters())[:4] == [*(X, WEIGHT, BIAS, -X)], (
        "the copy of the input goes first"
    )


@pytest.mark.parametrize(("norm", "count"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_a_norm_and_a_linear_layer_in_one_keep_what_is_between(
    gpu: Any, norm: str, count: int
) -> None:
    both = module("LayerNormLinear", INNER, OUTER, normalization=norm)
    assert gpu.events() == [*[GAMMA] * count, WEIGHT, BIAS]
    x = made(4, 10, INNER)
    both(x)
    assert gpu.of(lambda: both(x)) == [*[SUMS] * count, X, Y]
    out = both(x)
    assert gradients(gpu, out, x, *both.parameters()) == [
        *(X, WEIGHT, BIAS, -X),
        *(X, *[GAMMA] * count, count * PARTS, -count * PARTS),
        *[-SUMS] * count,
        -X,
    ]


@pytest.mark.parametrize(("norm", "count"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_norms_keep_sums_and_need_a_workspace_for_their_gradients(
    gpu: Any, norm: str, count: int
) -> None:
    alone, x = module(norm, INNER), made(4, 10, INNER)
    assert gpu.of(lambda: alone(x)) == [*[SUMS] * count, X]
    out = alone(x)
    assert gradients(gpu, out, x, *alone.parameters()) == [
        *(X, *[GAMMA] * count, count * PARTS, -count * PARTS),
        *[-SUMS] * count,
    ]


def test_workspaces_of_norms() -> None:
    def needed(norm: str, columns: int, *, backward: bool = True, rows: int = 4096) -> Any:
        return workspace(norm, backward=backward, rows=rows, columns=columns, processors=132)

    assert needed("RMSNorm", 4096, backward=False) == (0, False), "one block for each row"
    # 132 processors of 2 blocks of 4 warps of 255 registers; both weights' parts, in float32.
    assert needed("LayerNorm", 4096) == (2 * 264 * 4096 * 4, True)
    assert needed("RMSNorm", 4096) == (264 * 4096 * 4, True)
    # 8 warps leave room for one block, of two a row: 66 rows at a time, and barriers and sums.
    assert needed("LayerNorm", 6144) == (2 * 132 * 6144 * 4, True)
    columns = 8192
    assert needed("LayerNorm", columns) == (
        2 * 132 * 4 + 132 * 2 * 8 * 2 + 2 * 132 * columns * 4,
        True,
    )
    # No kernel for 5000 columns: two blocks of 4096 for each of 12 rows, as many as there are.
    assert needed("RMSNorm", 5000, rows=12) == (96 + 12 * 2 * 8 * 2 + 12 * 5000 * 4, False)


def test_what_is_estimated_is_said() -> None:
    with simulate("H100") as gpu:
        norm, x = module("RMSNorm", 4096), made(64, 4096)
        norm(x).sum().backward()
        assert any("transformer-engine's RMSNorm is an estimate" in each for each in gpu.notes)


def test_what_is_not_covered_is_refused_by_name(gpu: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"Linear\(tp_size=2\) of transformer-eng"):
        module("Linear", INNER, OUTER, tp_size=2)
    with pytest.raises(UnsupportedOperatorError, match=r"LayerNormLinear\(parameters_split="):
        module("LayerNormLinear", INNER, OUTER, parameters_split=("q", "k"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp'"):
        module("Linear", INNER, OUTER, tp=2)
    with pytest.raises(AssertionError, match="Data types for parameters must match"):
        module("Linear", INNER, OUTER)(made(4, INNER, dtype=torch.float32))


def test_it_is_there_where_it_is_named() -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer-engine is installed")
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine")
    with SimulatedGPU("H100", stand_ins=("transformer-engine",)).active():
        assert importlib.import_module("transformer_engine.pytorch").Linear
        with pytest.raises(UnsupportedOperatorError, match=r"pytorch\.attention"):
            importlib.import_module("transformer_engine.pytorch.attention")
