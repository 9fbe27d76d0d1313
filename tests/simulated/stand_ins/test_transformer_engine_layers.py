"""transformer-engine's composed modules: events are those of its own Python over its kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem.measurement.libraries import kept_by_libraries
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.stand_ins.transformer_engine import MODULES
from tests.pytest_project import Project

LENGTH, BATCH, HIDDEN, HEADS = 64, 2, 512, 8
X = LENGTH * BATCH * HIDDEN * 2
"""What goes from layer to layer, in bfloat16."""
INNER = 2048
SUMS = LENGTH * BATCH * 4
STATE, STATISTICS = 2 * 8, BATCH * HEADS * LENGTH * 4
ENDS = (BATCH + 1) * 4


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def module(name: str, *sizes: int, **options: Any) -> Any:
    return MODULES["transformer_engine.pytorch"][name](
        *sizes, params_dtype=torch.bfloat16, **options
    )


def made(length: int = LENGTH) -> Tensor:
    shape = length, BATCH, HIDDEN
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def second(gpu: Any, layer: Any, x: Tensor, **options: Any) -> tuple[Any, list[int]]:
    """Return what a second call makes: the first one makes what is kept."""
    layer(x, **options)
    gpu.events()
    out = layer(x, **options)
    return out, gpu.events()


def backward(gpu: Any, out: Tensor) -> list[int]:
    out.backward(torch.empty_like(out))
    return gpu.events()  # type: ignore[no-any-return]


ATTENTION = [X, STATE, 1, STATISTICS, -1]


def test_attention_takes_views_of_one_projection(gpu: Any) -> None:
    layer, x = module("MultiheadAttention", HIDDEN, HEADS), made()
    weight = HIDDEN * HIDDEN * 2
    assert gpu.events() == [3 * weight, 3 * HIDDEN * 2, weight, HIDDEN * 2, X]
    assert {name for name, _ in layer.named_parameters()} >= {"qkv.query_weight", "proj.bias"}
    out, events = second(gpu, layer, x)
    assert events == [3 * X, *ATTENTION, X]
    events = backward(gpu, out)
    assert events.count(3 * X) == 1, "the gradient of the projection is written by the kernel"


def test_rotary_embeddings_copy_queries_and_keys(gpu: Any) -> None:
    layer, x = module("MultiheadAttention", HIDDEN, HEADS, num_gqa_groups=2), made()
    rotary = MODULES["transformer_engine.pytorch"]["RotaryPositionEmbedding"](HIDDEN // HEADS)
    gpu.events()
    angles = rotary(2 * LENGTH)
    assert 2 * LENGTH * HIDDEN // HEADS * 4 in gpu.events()
    assert angles.shape == (2 * LENGTH, 1, 1, HIDDEN // HEADS)
    _, events = second(gpu, layer, x, rotary_pos_emb=angles)
    # Queries, keys, and the values, which lie alone where no kernel takes them.
    assert events == [3 * X // 2, X, X // 4, X // 4, *ATTENTION, X, -3 * X // 2]


def test_cross_attention_has_two_projections(gpu: Any) -> None:
    layer = module(
        "MultiheadAttention", HIDDEN, HEADS, attention_type="cross", attn_mask_type="no_mask"
    )
    _, events = second(gpu, layer, made(), encoder_output=made(LENGTH // 2))
    assert events == [X, X, *ATTENTION, X], "keys and values of half as many tokens, together"


def test_norms_of_heads(gpu: Any) -> None:
    layer = module("MultiheadAttention", HIDDEN, HEADS, qk_norm_type="RMSNorm")
    assert gpu.events()[:2] == [HIDDEN // HEADS * 4] * 2, "in the default type"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, events = second(gpu, layer, made())
    sums = LENGTH * BATCH * HEADS * 4
    assert events.count(sums) == 2 + 1, "of queries and keys, and as many of the softmax"
    with pytest.raises(UnsupportedOperatorError, match="L2Normalization"):
        module("MultiheadAttention", HIDDEN, HEADS, qk_norm_type="L2Normalization")


def test_a_layer_without_biases_adds_residuals_by_torch(gpu: Any) -> None:
    options: dict[str, Any] = {
        "bias": False,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    layer, x = module("TransformerLayer", HIDDEN, INNER, HEADS, **options), made()
    inner = X // HIDDEN * INNER
    _, events = second(gpu, layer, x)
    assert events == [
        *(SUMS, X, 3 * X, *ATTENTION, X, X),
        *(SUMS, X, 2 * inner, inner, X, X),
        *(-X, -X),
    ], "both products' outputs go when the residual is added"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # asked by Dynamo
def test_a_layer_with_biases_is_fused_by_torchs_compiler(gpu: Any) -> None:
    layer, x = module("TransformerLayer", HIDDEN, INNER, HEADS), made()
    inner, seed = X // HIDDEN * INNER, 8
    out, events = second(gpu, layer, x)
    dropped = [X, seed, X // 2, X, -seed]
    assert events == [
        *(SUMS, SUMS, X, 3 * X, *ATTENTION, *dropped),
        *(SUMS, SUMS, X, inner, inner, *dropped),
        *(-X, -X),
    ], "a product, a seed, a mask of bytes, and what goes on"
    events = backward(gpu, out)
    assert events.count(3 * X) == 1


@pytest.mark.parametrize(
    ("options", "adds"),
    [({"parallel_attention_mlp": True}, 1), ({"output_layernorm": True}, 2)],
)
def test_other_orders_of_a_layer(gpu: Any, options: dict[str, Any], adds: int) -> None:
    layer = module("TransformerLayer", HIDDEN, INNER, HEADS, hidden_dropout=0.0, **options).eval()
    with torch.no_grad():
        layer(made())
    names = {name.split(".")[0] for name, _ in layer.named_parameters()}
    assert names >= {"self_attention", "layernorm_mlp"}
    assert ("layernorm" in names) is ("output_layernorm" in options)


def test_what_is_not_covered_is_refused_by_name(gpu: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"TransformerLayer\(tp_size=2\)"):
        module("TransformerLayer", HIDDEN, INNER, HEADS, tp_size=2)
    with pytest.raises(UnsupportedOperatorError, match="seq_length and micro_batch_size"):
        module("TransformerLayer", HIDDEN, INNER, HEADS, seq_length=8, micro_batch_size=2)
    with pytest.raises(AssertionError, match="layer_type both not supported"):
        module("TransformerLayer", HIDDEN, INNER, HEADS, layer_type="both")
    module("TransformerLayer", HIDDEN, INNER, HEADS, ub_overlap_ag=True)


_SUITE = """
    import importlib
    import pytest
    import torch

    pytestmark = pytest.mark.gpumem(max_leak=0)

    @pytest.mark.parametrize("time", ["first", "second"])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_linear(fp8, time):
        te = importlib.import_module("transformer_engine.pytorch")
        linear = te.Linear(256, 256, params_dtype=torch.bfloat16)
        x = torch.empty(16, 256, device="cuda", dtype=torch.bfloat16)
        with te.fp8_autocast(enabled=fp8):
            linear(x)

    def test_leak():
        test_leak.kept = torch.empty(1024, device="cuda")
"""


def test_what_the_library_keeps_is_no_leak_and_each_test_is_charged_for_it(
    project: Project,
) -> None:
    project.write(test_kept=_SUITE)
    report = project.path / "report.json"
    result = project.run(
        "--gpumem-sim-stand-ins=transformer-engine",
        f"--gpumem-report=json:{report}",
        device="--gpumem-device=sim:H100",
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["4.0 KiB*still allocated after the test*"])
    peaks = _peaks(report)
    # The weight, the input, the output, and the workspace of all products.
    assert peaks["False-first"] == peaks["False-second"]
    assert peaks["True-first"] == peaks["True-second"]


def _peaks(report: Path) -> dict[str, int]:
    tests = json.loads(report.read_text())["tests"]
    return {
        test["nodeid"].partition("[")[2].rstrip("]"): test["measurement"]["peak_allocated"]
        for test in tests
    }


def test_what_the_library_itself_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.empty(1)
    module = SimpleNamespace(_cublas_workspace=kept)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", module)
    assert any(each is kept for each in kept_by_libraries())
