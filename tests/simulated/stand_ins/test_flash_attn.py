"""flash-attn 2: every function allocates what csrc/flash_attn/flash_api.cpp of 2.8.3 does.

Bytes are worked out from that file; an A100 has 108 multiprocessors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from pytest_gpumem import simulate

BATCH, LENGTH, HEADS, SIZE = 2, 100, 4, 64
ROWS = 128
"""LENGTH, rounded up to what a block of queries holds."""

OUT = BATCH * LENGTH * HEADS * SIZE * 2
LSE = BATCH * HEADS * LENGTH * 4
RNG = 2 * 8
DELTA = BATCH * HEADS * ROWS * 4
ACCUMULATED = BATCH * ROWS * HEADS * SIZE * 4


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("A100-40GB")


@pytest.fixture
def flash(gpu: Any) -> Any:
    return importlib.import_module("flash_attn")


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def heads(count: int = HEADS, size: int = SIZE, length: int = LENGTH) -> Tensor:
    return made(BATCH, length, count, size)


def gradients(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    """Return the events of backward from an allocated gradient."""
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_forward_allocates_output_logsumexp_and_random_state(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    assert gpu.of(lambda: flash.flash_attn_func(q, k, v, causal=True)) == [OUT, LSE, RNG]


def test_without_gradients_only_the_output_stays(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    with torch.no_grad():
        assert gpu.of(lambda: flash.flash_attn_func(q, k, v)) == [OUT, LSE, RNG, -LSE, -RNG]


def test_backward_accumulates_gradients_of_queries_in_float32(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    out = flash.flash_attn_func(q, k, v)
    assert gradients(gpu, out, q, k, v) == [
        *(OUT, OUT, OUT, DELTA, ACCUMULATED, -ACCUMULATED, -DELTA),
        *(-LSE, -RNG),
    ]


def test_gradients_of_grouped_heads_are_made_per_head_and_summed(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(2), heads(2)
    out = flash.flash_attn_func(q, k, v)
    assert gradients(gpu, out, q, k, v) == [
        *(OUT, OUT // 2, OUT // 2, DELTA, ACCUMULATED, OUT, OUT),
        *(-OUT, -OUT, -ACCUMULATED, -DELTA, -LSE, -RNG),
    ]


@pytest.mark.parametrize("grouped", [4, 2])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_torchs_flash_kernel_allocates_the_same(
    gpu: Any, flash: Any, grouped: int, size: int
) -> None:
    # Torch's rule is held to recordings of GPUs; its offset of random numbers, 8 bytes, is extra.
    tensors = heads(4, size, 300), heads(grouped, size, 300), heads(grouped, size, 300)
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    out = flash.flash_attn_func(*tensors, causal=True)
    got = gradients(gpu, out, *tensors)
    torchs = attend(q, k, v, is_causal=True, enable_gqa=True)
    assert gradients(gpu, torchs, *tensors) == [*got, -8]


def test_deterministic_gradients_are_accumulated_in_parts(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    out = flash.flash_attn_func(q, k, v, deterministic=True)
    # 108 multiprocessors over 2 x 4 heads: 14 parts.
    assert 14 * ACCUMULATED in gradients(gpu, out, q, k, v)


@pytest.mark.parametrize(
    ("size", "rounded"), [(32, 32), (40, 64), (80, 96), (128, 128), (136, 192), (200, 256)]
)
def test_accumulated_heads_are_rounded(gpu: Any, flash: Any, size: int, rounded: int) -> None:
    q, k, v = heads(size=size), heads(size=size), heads(size=size)
    out = flash.flash_attn_func(q, k, v)
    assert gradients(gpu, out, q, k, v)[4] == BATCH * ROWS * HEADS * rounded * 4


def test_heads_that_are_no_multiple_of_8_are_copied(gpu: Any, flash: Any) -> None:
    q, k, v = heads(size=60), heads(size=60), heads(size=60)
    events = gpu.of(lambda: flash.flash_attn_func(q, k, v))
    assert events == [OUT, OUT, OUT, OUT, LSE, RNG]


def test_dropout_can_return_the_probabilities(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    events = gpu.of(lambda: flash.flash_attn_func(q, k, v, 0.1, return_attn_probs=True))
    assert events == [OUT, LSE, BATCH * HEADS * ROWS * ROWS * 2, RNG]


def test_packed_gradients_are_one_tensor(gpu: Any, flash: Any) -> None:
    qkv = made(BATCH, LENGTH, 3, HEADS, SIZE)
    out = flash.flash_attn_qkvpacked_func(qkv)
    assert gradients(gpu, out, qkv)[:3] == [3 * OUT, DELTA, ACCUMULATED]
    q, kv = heads(), made(BATCH, LENGTH, 2, 2, SIZE)
    out = flash.flash_attn_kvpacked_func(q, kv)
    assert gradients(gpu, out, q, kv)[:4] == [OUT, OUT, DELTA, ACCUMULATED]


TOTAL, SEQUENCES = 300, 3


@pytest.fixture
def starts(gpu: Any) -> Tensor:
    return torch.tensor([0, 100, 120, TOTAL], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("packed", [0, 2, 3])
def test_packed_sequences_are_padded_in_the_accumulated_gradient(
    gpu: Any, flash: Any, starts: Tensor, packed: int
) -> None:
    calls: dict[int, tuple[Callable[..., Any], list[Tensor], int]] = {
        0: (flash.flash_attn_varlen_func, [made(TOTAL, HEADS, SIZE) for _ in range(3)], 2),
        2: (
            flash.flash_attn_varlen_kvpacked_func,
            [made(TOTAL, HEADS, SIZE), made(TOTAL, 2, HEADS, SIZE)],
            2,
        ),
        3: (flash.flash_attn_varlen_qkvpacked_func, [made(TOTAL, 3, HEADS, SIZE)], 1),
    }
    function, tensors, sides = calls[packed]
    out = TOTAL * HEADS * SIZE * 2
    lse = HEADS * TOTAL * 4
    lengths = [starts] * sides + [180] * sides
    gpu.events()
    result = function(*tensors, *lengths, causal=True)
    assert gpu.events() == [out, lse, RNG]
    rows = TOTAL + 128 * SEQUENCES
    delta, accumulated = HEADS * rows * 4, rows * HEADS * SIZE * 4
    grads = {0: [out, out, out], 2: [out, 2 * out], 3: [3 * out]}[packed]
    assert gradients(gpu, result, *tensors) == [
        *(*grads, delta, accumulated, -accumulated, -delta, -lse, -RNG)
    ]


def test_a_single_query_splits_the_keys_of_a_cache(gpu: Any, flash: Any) -> None:
    cache = made(1, 4096, 8, 128, grad=False), made(1, 4096, 8, 128, grad=False)
    q = made(1, 1, 32, 128, grad=False)
    # 8 heads of 4 queries; 32 blocks of 128 keys over 216 halves of multiprocessors: 16 parts,
    # the fewest that are 85 % as busy (8 x 16 / 216) as the best, and no more blocks each than 15.
    lse, parts = 8 * 4 * 4, 16 * 8 * 4 * 4
    lengths = torch.full((1,), 4000, dtype=torch.int32, device="cuda")
    events = gpu.of(lambda: flash.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths))
    assert events == [
        *(32 * 128 * 2, lse, parts, parts * 128, -parts * 128, -parts, -lse),
    ]
    assert flash.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths).shape == q.shape


def test_a_length_given_as_a_number_is_made_a_tensor(gpu: Any, flash: Any) -> None:
    cache = made(2, 256, 4, 64, grad=False), made(2, 256, 4, 64, grad=False)
    q = made(2, 1, 4, 64, grad=False)
    new = made(2, 1, 4, 64, grad=False), made(2, 1, 4, 64, grad=False)
    events = gpu.of(lambda: flash.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=7))
    # Python drops arguments before other names.
    assert events == [2 * 4, 2 * 4 * 64 * 2, 2 * 4 * 4, -2 * 4, -2 * 4 * 4]


def test_padding_is_removed_and_restored(gpu: Any, flash: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], device="cuda")
    hidden = made(2, 4, 8)
    rows, indices, starts, longest, used = padding.unpad_input(hidden, mask)
    assert (rows.shape, indices.shape, longest) == ((5, 8), (5,), 3)
    assert starts.tolist() == [0, 3, 5]
    assert used.tolist() == [3, 2]
    assert padding.pad_input(rows, indices, 2, 4).shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        ("T4", {}, "FlashAttention only supports Ampere GPUs or newer"),
        ("A100-40GB", {"dtype": torch.float32}, "only support fp16 and bf16"),
        ("A100-40GB", {"size": 264}, "at most 256"),
        ("A100-40GB", {"grouped": 3}, "must divide number of heads"),
    ],
)
def test_inputs_that_the_library_refuses_are_refused(
    on: Any, model: str, inputs: dict[str, Any], sentence: str
) -> None:
    on(model)
    flash = importlib.import_module("flash_attn")
    size, dtype = inputs.get("size", 64), inputs.get("dtype", torch.half)
    q = made(1, 8, 4, size, dtype=dtype)
    k = made(1, 8, inputs.get("grouped", 4), size, dtype=dtype)
    with pytest.raises(RuntimeError, match=sentence):
        flash.flash_attn_func(q, k, k)


def test_signatures_of_functions_have_the_librarys_names(flash: Any) -> None:
    names = inspect.signature(flash.flash_attn_varlen_func).parameters
    assert {"window_size", "deterministic", "softcap", "block_table", "max_seqlen_k"} <= set(names)
    with pytest.raises(TypeError, match="s_aux"):
        flash.flash_attn_func(heads(), heads(), heads(), s_aux=None)


def test_tensors_of_the_host_are_refused(gpu: Any, flash: Any) -> None:
    q = torch.zeros(1, 8, 4, 64, dtype=torch.half)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        flash.flash_attn_func(q, q, q)


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().cpu().float().transpose(0, 1).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("keys", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_real_values_equal_those_of_attention(keys: int, causal: bool) -> None:
    with simulate(real_values=True):
        flash = importlib.import_module("flash_attn")
        q, k, v = (
            torch.randn(12, count, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for count in (4, keys, keys)
        )
        starts = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")
        out = flash.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=causal)
        alone = flash.flash_attn_func(*(each[None, 5:] for each in (q, k, v)), causal=causal)
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), grad)
        also = torch.autograd.grad(alone, (q, k, v), grad[None, 5:])
        torch.testing.assert_close(alone.cpu()[0], out.cpu()[5:])
        for one, other in zip(got, also, strict=True):
            torch.testing.assert_close(one.cpu()[5:], other.cpu()[5:])
        host = on_cpu(q, k, v)
        queries, of_keys, of_values = (each[:, 5:] for each in host)
        reference = attend(queries, of_keys, of_values, is_causal=causal, enable_gqa=True)
        seen = out.cpu()[5:].float().transpose(0, 1)
        torch.testing.assert_close(seen, reference, rtol=0.02, atol=0.02)
        expected = torch.autograd.grad(reference, host, grad.cpu()[5:].float().transpose(0, 1))
        for one, other in zip(got, expected, strict=True):
            seen = one.cpu()[5:].float().transpose(0, 1)
            torch.testing.assert_close(seen, other[:, 5:], rtol=0.05, atol=0.05)


def test_a_window_and_slopes_are_aligned_to_the_last_key() -> None:
    with simulate(real_values=True):
        flash = importlib.import_module("flash_attn")
        q, k, v = (
            torch.randn(1, length, 2, 16, device="cuda", dtype=torch.half) for length in (3, 5, 5)
        )
        slopes = torch.tensor([0.5, 0.25], device="cuda")
        out = flash.flash_attn_func(q, k, v, window_size=(1, 0), alibi_slopes=slopes).cpu()
        queries, keys, values = (each.cpu().float()[0].transpose(0, 1) for each in (q, k, v))
    # The last of 3 queries sees keys 3 and 4, and 3 is one away.
    scores = (keys[:, 3:] @ queries[:, 2, :, None])[..., 0] / 4
    scores[:, 0] -= torch.tensor([0.5, 0.25])
    expected = (torch.softmax(scores, -1)[:, None] @ values[:, 3:])[:, 0]
    torch.testing.assert_close(out[0, 2].float(), expected, rtol=0.01, atol=0.01)
