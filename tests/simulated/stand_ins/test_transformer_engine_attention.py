"""transformer-engine's attention: the events are those of its own Python over its kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.stand_ins.transformer_engine import MODULES
from pytest_gpumem.simulated.stand_ins.transformer_engine.choice import (
    FLASH,
    FLASH_3,
    FUSED,
    UNFUSED,
    Asked,
    choose,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.cudnn import (
    Shape,
    quantized_batch,
    quantized_tokens,
    workspace,
)

LENGTH, BATCH, HEADS, SIZE = 64, 2, 8, 32
X = LENGTH * BATCH * HEADS * SIZE * 2
"""Queries, keys, values or outputs in bfloat16."""
ENDS = (BATCH + 1) * 4
STATISTICS = BATCH * HEADS * LENGTH * 4
"""One float32 of each query: [batch, heads, length, 1]."""
STATE = 2 * 8
WORK = STATISTICS + BATCH * HEADS * LENGTH * SIZE * 4
"""Sums for the softmax, and the gradient of queries in float32."""
SCORES = BATCH * HEADS * LENGTH * LENGTH * 2


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def attention(*args: Any, **options: Any) -> Any:
    module = MODULES["transformer_engine.pytorch"]["DotProductAttention"]
    return module(*(args or (HEADS, SIZE)), **options)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(
        shape or (LENGTH, BATCH, HEADS, SIZE), device="cuda", dtype=dtype, requires_grad=True
    )


def gradients(gpu: Any, out: Tensor, inputs: Sequence[Tensor]) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_cudnns_attention_keeps_statistics_and_the_generators_state(gpu: Any) -> None:
    module, inputs = attention(), [made() for _ in range(3)]
    gpu.events()
    out = module(*inputs)
    assert gpu.events() == [ENDS, X, STATE, 1, STATISTICS, -1]
    assert out.shape == (LENGTH, BATCH, HEADS * SIZE)
    assert gradients(gpu, out, inputs) == [X, X, X, WORK, -WORK, -STATISTICS, -STATE]
    assert gpu.of(lambda: module(*inputs))[0] == X, "ends of full sequences are made once"


def test_gradients_lie_as_queries_keys_and_values_do(gpu: Any) -> None:
    module = attention()
    for dim, shape in ((2, (LENGTH, BATCH, 3, HEADS, SIZE)), (3, (LENGTH, BATCH, HEADS, 3, SIZE))):
        packed = made(*shape)
        out = module(*packed.unbind(dim))
        assert gradients(gpu, out, [packed])[0] == 3 * X, "one tensor, and its views"
    query, pair = made(), made(LENGTH, BATCH, 2, HEADS, SIZE)
    out = module(query, *pair.unbind(2))
    assert gradients(gpu, out, [query, pair])[:2] == [X, 2 * X]


def test_fewer_heads_of_keys_are_copied_out_of_one_projection(gpu: Any) -> None:
    mixed = made(LENGTH, BATCH, 6, 2, SIZE)
    parts = [part.reshape(LENGTH, BATCH, -1, SIZE) for part in mixed.split([4, 1, 1], 2)]
    module = attention(HEADS, SIZE, num_gqa_groups=2)
    module(*parts)
    assert gpu.of(lambda: module(*parts))[:3] == [X, X // 4, X // 4], "no kernel takes them there"


def test_masks_of_padding_become_ends_of_sequences(gpu: Any) -> None:
    module, inputs = attention(attn_mask_type="padding"), [made() for _ in range(3)]
    mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool, device="cuda")
    gpu.events()
    out = module(*inputs, attention_mask=mask)
    events = gpu.events()
    # Lengths of each sequence, for queries and keys, at 16 bytes.
    at = events.index(X)
    assert events[at : at + 5] == [X, STATE, 2 * 16, STATISTICS, -2 * 16]
    assert gradients(gpu, out, inputs)[3] == WORK + 2 * 16


def test_tokens_behind_each_other_are_counted_in_powers_of_two(gpu: Any) -> None:
    module = attention(qkv_format="thd", attn_mask_type="padding_causal")
    inputs = [made(1500, HEADS, SIZE) for _ in range(3)]
    ends = torch.tensor([0, 500, 1500], dtype=torch.int32, device="cuda")
    gpu.events()
    out = module(
        *inputs, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=1024, max_seqlen_kv=1024
    )
    # Of 32 sequences: two lengths of 4 bytes, and 5 offsets of 8 bytes with one behind the last.
    extra = 2 * 32 * 4 + 5 * (33 * 8 + 8)
    statistics = 2048 * HEADS * 4
    assert gpu.events() == [1500 * HEADS * SIZE * 2, STATE, extra, statistics, -extra]
    work = statistics + 2048 * HEADS * SIZE * 4 + extra
    assert gradients(gpu, out, inputs)[3] == work
    with pytest.raises(AssertionError, match="must be padding"):
        module(*inputs, attn_mask_type="causal")


def test_a_bias_keeps_scores_instead_of_a_sum(gpu: Any) -> None:
    module, inputs = attention(attn_mask_type="no_mask"), [made() for _ in range(3)]
    bias = made(1, HEADS, LENGTH, LENGTH)
    out = module(*inputs, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    work = STATISTICS + SCORES
    assert gradients(gpu, out, [*inputs, bias])[:6] == [X, X, X, SCORES // 2, work, -work]


def test_in_fp8_attention_stays_wide_and_has_scales(gpu: Any) -> None:
    module, inputs = attention(), [made() for _ in range(3)]
    gpu.events()
    with MODULES["transformer_engine.pytorch"]["fp8_autocast"]():
        module(*inputs)
    # 3 tensors of each of 3 products forward, 2 backward.
    assert gpu.events()[:5] == [9 * 4, 1024 * 9 * 4, 6 * 4, 1024 * 6 * 4, ENDS]


def test_workspaces_of_cudnn() -> None:
    assert [quantized_batch(each) for each in (1, 32, 33, 500, 513)] == [32, 32, 64, 512, 513]
    assert [quantized_tokens(each) for each in (1, 1025, 32768, 32769)] == [
        1024,
        2048,
        32768,
        65536,
    ]
    shape = Shape(2, 8, 2, 100, 130, 64, 32, None, pads=False, keeps_scores=False)
    assert workspace(shape, backward=False) == 1
    assert workspace(shape, backward=True) == 2 * 8 * 100 * 4 * (1 + 64)
    # Scores of 128 x 192, in multiples of 64.
    kept = shape._replace(keeps_scores=True)
    assert workspace(kept, backward=True) == 2 * 8 * 100 * 4 + 2 * 8 * 128 * 192 * 2


def asked(**options: Any) -> Asked:
    defaults: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "format": "sbhd",
        "layout": "hd_hd_hd",
        "mask": "causal",
        "window": (-1, 0),
        "bias": "no_bias",
        "bias_needs_grad": False,
        "dropout": 0.0,
        "training": True,
        "deterministic": False,
        "padded": False,
        "heads": 8,
        "groups": 8,
        "length_q": 1024,
        "length_kv": 1024,
        "size_qk": 64,
        "size_v": 64,
    }
    return Asked(**defaults | options)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("H100", {}, FUSED),
        ("A100-40GB", {}, FUSED),
        ("L4", {"dropout": 0.1, "groups": 2}, FUSED),
        ("T4", {"dtype": torch.float16}, UNFUSED),
        ("H100", {"dtype": torch.float32}, UNFUSED),
        ("H100", {"mask": "arbitrary", "window": (-1, -1)}, UNFUSED),
        ("H100", {"window": (128, 128), "mask": "no_mask"}, UNFUSED),
        ("H100", {"window": (128, 0)}, FUSED),
        ("H100", {"window": (128, 0), "dropout": 0.1}, UNFUSED),
        ("H100", {"size_qk": 256, "size_v": 256}, FUSED),
        ("A100-40GB", {"size_qk": 256, "size_v": 256}, UNFUSED),
        ("A100-40GB", {"size_qk": 256, "size_v": 256, "training": False}, FUSED),
        ("H100", {"size_qk": 60, "size_v": 60}, UNFUSED),
        ("H100", {"bias": "pre_scale_bias"}, UNFUSED),
        ("H100", {"deterministic": True}, FUSED),
        ("A100-40GB", {"deterministic": True}, UNFUSED),
        ("H100", {"mask": "causal_bottom_right", "length_q": 512}, FUSED),
        ("H100", {"mask": "causal_bottom_right", "length_kv": 512}, UNFUSED),
        ("H100", {"format": "thd", "mask": "padding", "window": (-1, -1)}, FUSED),
    ],
)
def test_which_attention_runs(on: Any, model: str, options: dict[str, Any], expected: str) -> None:
    on(model, "2.13")
    assert choose(asked(**options)) == expected


def test_flash_attn_is_chosen_where_its_release_is_known(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"flash-attn": "2.8.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    on("A100-40GB")
    assert choose(asked()) == FLASH
    assert choose(asked(bias="post_scale_bias")) == FUSED
    versions["flash-attn"] = "2.8.3"
    assert choose(asked()) == FUSED, "newer than what this release has been tried with"
    on("H100")
    versions["flash-attn"] = "2.8.1"
    assert choose(asked()) == FUSED, "preferred from Hopper on"
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert choose(asked()) == FLASH
    versions["flash-attn-3"] = "3.0.0"
    assert choose(asked()) == FLASH_3
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert choose(asked()) == UNFUSED
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match="No dot product attention backend is available"):
        choose(asked())


MASK = LENGTH * LENGTH
"""Bytes of a mask of all pairs."""


def test_unfused_attention_has_a_softmax_kernel(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    module, inputs = attention(), [made() for _ in range(3)]
    gpu.events()
    out = module(*inputs)
    allocated = [each for each in gpu.events() if each > 0]
    pairs = MASK * 4
    assert allocated == [
        ENDS,
        # Positions of rows and columns, how far they are apart, and the window's two sides.
        *(LENGTH * 4, LENGTH * 4, pairs, pairs, pairs, MASK, MASK, MASK, MASK, MASK),
        # Scores twice: memory for the product, and the product, and the workspace of cuBLAS.
        *(SCORES, SCORES, 33554432),
        *(SCORES, X, X),
    ]
    events = gradients(gpu, out, inputs)
    assert [each for each in events if each > 0].count(SCORES) == 1, "written over by its gradient"


def test_float32_has_no_softmax_kernel(gpu: Any) -> None:
    inputs = [made(dtype=torch.float32) for _ in range(3)]
    module = attention()
    module(*inputs)
    events = gpu.of(lambda: module(*inputs))
    assert MASK in events
    assert events.count(2 * SCORES) == 3, "memory for the product, the product, probabilities"


def test_flash_attn_3_runs_where_cudnn_may_not(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.0")
    for name in ("flash_attn_3", "flash_attn_3.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, _Flash)
    module, inputs = attention(), [made() for _ in range(3)]
    gpu.events()
    out = module(*inputs)
    assert gpu.events() == [ENDS, X, X, X, X, X, -X, -X, -X, -X], "batch first, and back"
    assert out.shape == (LENGTH, BATCH, HEADS * SIZE)


class _Flash:
    @staticmethod
    def flash_attn_func(q: Tensor, *args: Any, **options: Any) -> Tensor:
        assert q.shape == (BATCH, LENGTH, HEADS, SIZE)
        assert options["window_size"] == (-1, 0)
        return torch.empty_like(q)


def test_what_is_not_covered_is_refused_by_name(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"DotProductAttention\(cp_group='x'\)"):
        attention(HEADS, SIZE, cp_group="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        attention(HEADS, SIZE, causal=True)
    inputs = [made() for _ in range(3)]
    with pytest.raises(UnsupportedOperatorError, match="alibi"):
        attention()(*inputs, core_attention_bias_type="alibi")
    with pytest.raises(UnsupportedOperatorError, match="checkpoint_core_attention=True"):
        attention()(*inputs, checkpoint_core_attention=True)
    with pytest.raises(AssertionError, match="Attention mask type all is not supported"):
        attention()(*inputs, attn_mask_type="all")
    with pytest.raises(AssertionError, match="num_gqa_group = 4"):
        attention(HEADS, SIZE, num_gqa_groups=4)(*inputs)
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "0")
    with pytest.raises(UnsupportedOperatorError, match="NVTE_FUSED_ATTN_BACKEND=0"):
        attention()(*inputs)
