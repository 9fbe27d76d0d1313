"""FlexAttention without ``torch.compile``: torch captures it, and traces its scores' gradients.

Peaks are those of torch's own CUDA code on the dry device, taken with the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_gpumem import simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="peaks were taken of 2.13 and 2.15"),
]

TOKENS = 256
DRY_PEAKS = {
    "2.13": {
        "plain": 33_344_000,
        "causal": 33_346_048,
        "relative": 33_344_000,
        "biased": 48_168_448,
        "bias of a constant": 32_296_448,
    },
    "2.15": {
        "plain": 23_251_968,
        "causal": 23_319_040,
        "relative": 23_251_968,
        "biased": 31_129_088,
        "bias of a constant": 23_251_968,
    },
}


def scores(kind: str, bias: Tensor) -> Callable[..., Tensor] | None:
    if kind == "relative":
        return lambda score, b, h, i, j: score + (i - j)
    if bias.requires_grad or kind == "bias of a constant":
        return lambda score, b, h, i, j: score + bias[h]
    return None


def attend(kind: str) -> Tensor:
    """Run forward and backward; return the bias, which may have a gradient."""

    def tokens() -> Tensor:
        options: Any = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        return torch.randn(2, 4, TOKENS, 64, **options)

    query, key, value = tokens(), tokens(), tokens()
    bias = torch.randn(4, device="cuda", requires_grad=kind == "biased")
    mask = None
    if kind == "causal":
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cuda"
        )
    out: Any = flex_attention(query, key, value, score_mod=scores(kind, bias), block_mask=mask)
    out.sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    return bias


@pytest.mark.parametrize("kind", DRY_PEAKS["2.13"])
def test_peaks_equal_those_of_torchs_own_code(kind: str) -> None:
    release = "2.15" if torch.__version__ >= "2.15" else "2.13"
    if release == "2.13" and torch.__version__ >= "2.14":
        pytest.skip("peaks were taken of 2.13 and 2.15")
    with simulate("A100-40GB") as gpu:
        attend(kind)
    assert gpu.peak_allocated == DRY_PEAKS[release][kind]


def test_a_tensor_that_score_mod_closes_over_gets_a_gradient() -> None:
    with simulate("A100-40GB"):
        assert attend("biased").grad is not None


def test_a_gradient_is_traced_where_the_test_runs_compiled_code_eagerly() -> None:
    with simulate("A100-40GB", compile="eager") as gpu:
        attend("plain")
    with simulate("A100-40GB") as other:
        attend("plain")
    assert gpu.peak_allocated == other.peak_allocated


def test_the_gradient_of_scores_is_traced_with_two_examples() -> None:
    """One is like the result of ``score_mod``, and one like that: both are on the GPU, at once."""
    with simulate("A100-40GB") as gpu:
        query = torch.randn(1, 2, 16, 16, device="cuda", requires_grad=True)
        flex_attention(query, query, query, score_mod=lambda score, b, h, q, k: score + q)
        events = [event for event in gpu.trace if event.action in ("alloc", "free_requested")]
    made = [f"{event.action[0]}{event.size}" for event in events]
    examples = ["a4", "a4", "f4", "f4"]
    assert examples in [made[at : at + 4] for at in range(len(made))]
