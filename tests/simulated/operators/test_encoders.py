"""The fast path of transformer encoders without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate

BATCH, LENGTH, WIDTH, HEADS, INNER = 2, 10, 64, 4, 256
TOKENS = BATCH * LENGTH * WIDTH * 4
PROJECTED = 3 * TOKENS
HIDDEN = BATCH * LENGTH * INNER * 4
STATISTICS = BATCH * LENGTH * 4
NORM = [TOKENS, STATISTICS, STATISTICS, -STATISTICS, -STATISTICS]
WORKSPACE = 1 << 20
LT = [WORKSPACE, -WORKSPACE]
"""What every product takes before 2.9."""


def layer(**options: Any) -> nn.Module:
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, **options)
    return made.cuda().eval()


def tokens(**options: Any) -> torch.Tensor:
    return torch.rand(BATCH, LENGTH, WIDTH, device="cuda", **options)


@torch.no_grad()
def test_a_layer_adds_in_place_and_frees_in_the_order_of_cpp(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    encoder, x = layer(), tokens()
    encoder(x)  # cuBLAS's workspace comes with the first product
    assert gpu.of(lambda: encoder(x)) == [
        PROJECTED, *LT,
        TOKENS,  # attention
        TOKENS, *LT, -TOKENS, -PROJECTED,
        *NORM, -TOKENS,
        HIDDEN, *LT, TOKENS, *LT, -HIDDEN,
        *NORM, -TOKENS, -TOKENS,
    ]  # fmt: skip


@torch.no_grad()
def test_a_layer_that_normalizes_first(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    encoder, x = layer(norm_first=True), tokens()
    encoder(x)
    assert gpu.of(lambda: encoder(x)) == [
        *NORM,
        PROJECTED, *LT,
        TOKENS,
        TOKENS, *LT, -TOKENS, -PROJECTED, -TOKENS,
        *NORM,
        HIDDEN, *LT, TOKENS, *LT, -HIDDEN, -TOKENS,
        -TOKENS,
    ]  # fmt: skip


@torch.no_grad()
def test_attention_without_weights(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval(), tokens()
    attention(x, x, x, need_weights=False)
    assert gpu.of(lambda: attention(x, x, x, need_weights=False)[0]) == [
        PROJECTED, *LT, TOKENS, TOKENS, *LT, -TOKENS, -PROJECTED,
    ]  # fmt: skip


def test_the_fast_path_has_the_values_of_the_cpu() -> None:
    with simulate("A100-40GB", real_values=True), torch.no_grad():
        for encoder in (layer(), layer(norm_first=True, activation="gelu")):
            x = tokens()
            found = encoder(x).cpu()
            torch.testing.assert_close(found, encoder.cpu()(x.cpu()))


@torch.no_grad()
def test_attention_with_weights_has_kernels_of_its_own(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval(), tokens()
    attention(x, x, x)
    scores = BATCH * HEADS * LENGTH * LENGTH * 4
    events = gpu.of(lambda: attention(x, x, x))
    assert [event for event in events if event not in (*LT, LT[0])] == [
        PROJECTED, PROJECTED, -PROJECTED,  # with bias and scale
        scores, TOKENS, TOKENS, -TOKENS,  # the context is where queries were; merged, projected
        scores // HEADS, -scores,  # of all heads
        -PROJECTED,
    ]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_a_masked_softmax_has_a_result_of_its_own(on: Any, name: str) -> None:
    gpu = on("A100-40GB", "2.6")
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval(), tokens()
    attention(x, x, x)
    rows = BATCH if name == "key_padding_mask" else LENGTH
    masks: Any = {name: torch.zeros(rows, LENGTH, dtype=torch.bool, device="cuda")}
    scores = BATCH * HEADS * LENGTH * LENGTH * 4
    events = gpu.of(lambda: attention(x, x, x, need_weights=False, **masks))
    mask = rows * LENGTH
    # What is added to all heads' scores is expanded to them.
    flags = mask if name == "key_padding_mask" else BATCH * HEADS * LENGTH * LENGTH
    assert [event for event in events if event not in (*LT, LT[0])] == [
        mask * 4,  # as numbers to add
        PROJECTED, PROJECTED, -PROJECTED,
        scores, flags, scores, -scores, -flags,  # as flags again
        -scores, TOKENS, TOKENS, -TOKENS, -PROJECTED,
        -mask * 4,
    ]  # fmt: skip


def test_masked_values_equal_those_of_the_cpu() -> None:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[:, 7:] = True
    with simulate("A100-40GB", real_values=True), torch.no_grad():
        encoder, x = layer(), tokens()
        found = encoder(x, src_key_padding_mask=mask.cuda()).cpu()
        torch.testing.assert_close(found, encoder.cpu()(x.cpu(), src_key_padding_mask=mask))


def test_a_padding_mask_leaves_a_note() -> None:
    with simulate("A100-40GB", torch_version="2.13") as gpu, torch.no_grad():
        made: Any = layer()
        encoder = nn.TransformerEncoder(made, 1).half().eval()
        mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool, device="cuda")
        encoder(tokens(dtype=torch.float16), src_key_padding_mask=mask)
        assert any("simulated operator by operator" in note for note in gpu.notes)


def test_gradients_rule_out_the_fast_path() -> None:
    with simulate("A100-40GB") as gpu:
        assert layer()(tokens()).requires_grad
        assert not gpu.notes


def test_an_input_rebound_by_the_caller_is_freed() -> None:
    with simulate("T4") as gpu, torch.no_grad():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="cuda").eval()

        def run() -> int:
            x = torch.zeros(2, 128, 64, device="cuda")
            before = gpu.allocated
            x = layer(x)
            return gpu.allocated - before

        run()  # cuBLAS keeps its workspace
        assert run() == 0


def test_older_gpus_have_no_flash_attention(on: Any) -> None:
    on("T4")
    heads = torch.rand(1, 8, 2, 16, device="cuda", dtype=torch.half)
    with pytest.raises(RuntimeError, match="only supports Ampere GPUs or newer"):
        torch.ops.aten._flash_attention_forward(
            heads, heads, heads, None, None, 8, 8, 0.0, False, False
        )
