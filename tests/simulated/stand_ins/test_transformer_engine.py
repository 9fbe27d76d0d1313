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
from pytest_gpumem.simulated.stand_ins.transformer_engine.plans import bias_workspace, workspace

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
    # Forward, two blocks of 8192 columns for each of 8 rows: barriers, and sums of 4 bytes.
    assert needed("RMSNorm", 16384, backward=False, rows=8) == (2 * 8 * 4 + 8 * 2 * 4 * 2, False)


def test_before_a_frozen_weight_what_is_between_goes_at_once(gpu: Any) -> None:
    both = module("LayerNormLinear", INNER, OUTER)
    both.weight.requires_grad_(False)
    x = made(4, 10, INNER)
    both(x)
    assert gpu.of(lambda: both(x)) == [SUMS, SUMS, X, Y, -X]


def test_what_is_estimated_is_said() -> None:
    with simulate("H100") as gpu:
        norm, x = module("RMSNorm", 4096), made(64, 4096)
        norm(x).sum().backward()
        assert any("transformer-engine's RMSNorm is an estimate" in each for each in gpu.notes)


TOKENS = 64
NARROW = [4, TOKENS * INNER, TOKENS * INNER]
"""The inverse of a scale, a tensor in fp8, and its transpose."""
NARROW_WEIGHT = [4, OUTER * INNER, OUTER * INNER]
NARROW_GRADIENT = [4, TOKENS * OUTER, TOKENS * OUTER]
META = [3 * 4, 1024 * 3 * 4, 2 * 4, 1024 * 2 * 4]
"""Scales and 1,024 maxima of 3 tensors forward and 2 backward."""


def freed(narrow: list[int]) -> list[int]:
    inverse, data, transposed = narrow
    return [-data, -inverse, -transposed]


def fp8(**options: Any) -> Any:
    return MODULES["transformer_engine.pytorch"]["fp8_autocast"](**options)


def test_weights_in_parts_are_one_in_memory(gpu: Any) -> None:
    linear = module("Linear", INNER, OUTER, parameters_split={"key": 192, "value": 320})
    assert gpu.events() == [WEIGHT, BIAS], "one tensor each"
    assert {name: len(each) for name, each in linear.named_parameters()} == {
        "key_weight": 192,
        "value_weight": 320,
        "key_bias": 192,
        "value_bias": 320,
    }
    x = made(4, 10, INNER).detach()
    linear(x)
    assert gpu.of(lambda: linear(x)) == [Y], "no copy joins them"
    assert gradients(gpu, linear(x), *linear.parameters()) == [WEIGHT, BIAS], "nor splits gradients"
    for name in ("key", "value"):
        setattr(linear, f"{name}_weight", torch.nn.Parameter(getattr(linear, f"{name}_weight") * 1))
    linear(x)
    assert gpu.of(lambda: linear(x)) == [WEIGHT, Y], "elsewhere, they are joined"
    with pytest.raises(ValueError, match="Trying to split weight buffer"):
        module("Linear", INNER, OUTER, parameters_split={"key": 1})


def test_a_norm_that_is_returned_outlives_the_weight(gpu: Any) -> None:
    both = module("LayerNormLinear", INNER, OUTER, return_layernorm_output=True, bias=False)
    x = made(4, 10, INNER)
    both(x)
    gpu.events()
    out, normal = both(x)
    assert gpu.events() == [SUMS, SUMS, X, Y]
    assert normal.shape == x.shape
    grads = torch.empty_like(out), torch.empty_like(normal)
    assert gpu.of(lambda: torch.autograd.grad((out, normal), x, grads)) == [
        *(X, WEIGHT),
        *(X, X, GAMMA, GAMMA, 2 * PARTS, -2 * PARTS),
        *(-X, -SUMS, -SUMS, -X, -GAMMA, -GAMMA, -WEIGHT),
    ], "the gradient of the norm's output is added to the product's"


def test_in_fp8_a_copy_of_the_bias_lives_as_long_as_the_graph(gpu: Any) -> None:
    linear = module("Linear", INNER, OUTER, params_dtype=torch.float32)
    x = made(4, 16, INNER, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16), fp8():
        linear(x)
        gpu.events()
        out = linear(x)
        assert gpu.events() == [*NARROW, *NARROW_WEIGHT, BIAS, TOKENS * OUTER * 2, -NARROW[1]]
        del out
    assert -BIAS in gpu.events()


def test_in_fp8_a_linear_layer_keeps_transposes(gpu: Any) -> None:
    linear, x = module("Linear", INNER, OUTER), made(4, 16, INNER)
    linear(x)
    out_bytes = TOKENS * OUTER * 2
    with fp8():
        events = gpu.of(lambda: linear(x))
        assert events == [*META, *NARROW, *NARROW_WEIGHT, out_bytes, -NARROW[1]]
        gpu.events()
        out = linear(x)
        assert gpu.events() == [*NARROW, *NARROW_WEIGHT, out_bytes, -NARROW[1]]
    assert gpu.events() == [3 * 4, -3 * 4], "maxima of one module, joined"
    # Sums of 32 rows each, in float32: the cheapest tiles are of 32 x 32 elements.
    parts = TOKENS // 32 * OUTER * 4
    assert gradients(gpu, out, x, *linear.parameters()) == [
        *(BIAS, *NARROW_GRADIENT, parts, -parts),
        *(TOKENS * INNER * 2, WEIGHT, -NARROW[2]),
        *freed(NARROW_GRADIENT),
        *(-4, -OUTER * INNER, -OUTER * INNER, -4),
    ]


def test_the_backward_pass_of_the_first_module_updates_scales(gpu: Any) -> None:
    first, second = (module("Linear", INNER, INNER, bias=False) for _ in range(2))
    with fp8():
        out = second(first(made(TOKENS, INNER)))
    assert gpu.events()[-2:] == [2 * 3 * 4, -2 * 3 * 4]
    events = gradients(gpu, out, *first.parameters())
    joined = [2 * 2 * 4, -2 * 2 * 4]
    assert [events[at : at + 2] == joined for at in range(len(events))].count(True) == 1


def test_microbatches_share_the_weight_in_fp8(gpu: Any) -> None:
    linear, x = module("Linear", INNER, OUTER, bias=False), made(4, 16, INNER)
    out_bytes = TOKENS * OUTER * 2
    with fp8():
        linear(x, is_first_microbatch=True)
        events = gpu.of(lambda: linear(x, is_first_microbatch=False))
        assert events == [*NARROW, out_bytes, -NARROW[1]]
        with torch.no_grad():
            linear(x)
            assert gpu.of(lambda: linear(x)) == [
                *(NARROW[:2] + NARROW_WEIGHT[:2]),
                out_bytes,
                *(-NARROW[1], -4, -NARROW_WEIGHT[1], -4),
            ], "no transposes"


@pytest.mark.parametrize(("norm", "count"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_in_fp8_the_norm_writes_fp8(gpu: Any, norm: str, count: int) -> None:
    both = module("LayerNormLinear", INNER, OUTER, normalization=norm, bias=False)
    x = made(4, 16, INNER)
    sums, inner = TOKENS * 4, TOKENS * INNER * 2
    with fp8():
        both(x)
        gpu.events()
        out = both(x)
        assert gpu.events() == [
            *([sums] * count + NARROW + NARROW_WEIGHT),
            *(TOKENS * OUTER * 2, -NARROW[1]),
        ]
    parts = count * TOKENS // 4 * INNER * 4
    assert gradients(gpu, out, x, *both.parameters()) == [
        *(*NARROW_GRADIENT, inner, WEIGHT, -NARROW[2]),
        *(inner, *[GAMMA] * count, parts, -parts, *[-sums] * count),
        *freed(NARROW_GRADIENT),
        -inner,
        *(-OUTER * INNER, -OUTER * INNER, -4, -4),
    ]


def test_partial_sums_of_a_bias_follow_the_cheapest_tiles() -> None:
    # All tiles keep all processors at work, and the first one moves whole cache lines: 8 elements
    # for each of 32 threads.
    assert bias_workspace(4096, 4096, 2, 132) == 4096 // 256 * 4096 * 4
    # Not compiled at run time: 8 bytes of store.
    assert bias_workspace(40, 48, 2, 132) == 48 * 4


def test_fp8_needs_a_gpu_and_shapes_for_it(on: Any) -> None:
    on("A100-40GB")
    with pytest.raises(AssertionError, match=r"8\.9 or higher required"), fp8():
        pass
    on("B200")
    with pytest.raises(UnsupportedOperatorError, match="compute capability 10"), fp8():
        pass
    on("L4")
    linear = module("Linear", INNER, OUTER)
    with fp8(), pytest.raises(AssertionError, match=r"divisible by 8 .* dims=\[4, 256\]"):
        linear(made(4, INNER))
    recipe = MODULES["transformer_engine.common.recipe"]["DelayedScaling"]
    with (
        pytest.raises(UnsupportedOperatorError, match="attention in fp8"),
        fp8(fp8_recipe=recipe(fp8_dpa=True)),
    ):
        pass
    with pytest.raises(UnsupportedOperatorError, match="a second recipe"):
        for length in (16, 32):
            with fp8(fp8_recipe=recipe(amax_history_len=length)):
                linear(made(8, INNER))


def test_what_is_not_covered_is_refused_by_name(gpu: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"Linear\(tp_size=2\) of transformer-eng"):
        module("Linear", INNER, OUTER, tp_size=2)
    with pytest.raises(UnsupportedOperatorError, match=r"Linear\(sequence_parallel=True\)"):
        module("LayerNormLinear", INNER, OUTER, sequence_parallel=True)
    with pytest.raises(UnsupportedOperatorError, match="Linear with fp8_output=True"):
        module("Linear", INNER, OUTER)(made(8, INNER), fp8_output=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp'"):
        module("Linear", INNER, OUTER, tp=2)
    with pytest.raises(AssertionError, match="Data types for parameters must match"):
        module("Linear", INNER, OUTER)(made(4, INNER, dtype=torch.float32))


def test_kernels_that_the_environment_chooses_are_refused(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, x = module("RMSNorm", INNER), made(4, INNER)
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", "1")
    with pytest.raises(UnsupportedOperatorError, match="NVTE_NORM_FWD_USE_CUDNN=1 of transformer"):
        norm(x)
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", "0")
    norm(x)


def test_it_is_there_where_it_is_named() -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer-engine is installed")
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine")
    with SimulatedGPU("H100", stand_ins=("transformer-engine",)).active():
        assert importlib.import_module("transformer_engine.pytorch").Linear
        recipes = importlib.import_module("transformer_engine.common").recipe
        assert recipes.DelayedScaling().amax_history_len == 1024
        with pytest.raises(UnsupportedOperatorError, match=r"recipe\.MXFP8BlockScaling at"):
            _ = recipes.MXFP8BlockScaling
        with pytest.raises(UnsupportedOperatorError, match=r"pytorch\.graph"):
            importlib.import_module("transformer_engine.pytorch.graph")
