"""flash-attn 3: every function allocates what hopper/flash_api.cpp of 3.0.0 does.

Bytes are worked out from that file; an H100 has 132 multiprocessors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.imports import served

BATCH, LENGTH, HEADS, SIZE = 2, 100, 4, 64
OUT = BATCH * LENGTH * HEADS * SIZE * 2
LSE = BATCH * HEADS * LENGTH * 4
ROWS = BATCH * HEADS * 128 * 4
"""A number in float32 for each query, rounded to a block of 128."""


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    with served(("flash-attn-3",), lambda sentence: None):
        yield


@pytest.fixture
def flash() -> Any:
    return importlib.import_module("flash_attn_interface")


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("H100")


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def heads(count: int = HEADS, size: int = SIZE) -> Tensor:
    return made(BATCH, LENGTH, count, size)


def gradients(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_forward_needs_a_counter_where_a_mask_is_scheduled(gpu: Any, flash: Any) -> None:
    q, k, v = heads(), heads(), heads()
    assert gpu.of(lambda: flash.flash_attn_func(q, k, v)) == [OUT, LSE]
    # A counter, and two vectors with a number for each of 4 sequences.
    counter = (1 + 2 * 4) * 4
    events = gpu.of(lambda: flash.flash_attn_func(q, k, v, causal=True))
    assert events == [OUT, LSE, counter, -counter]


@pytest.mark.parametrize(("key_heads", "accumulated"), [(4, 0), (2, BATCH * 2 * 128 * SIZE * 4)])
def test_backward_accumulates_in_float32(
    gpu: Any, flash: Any, key_heads: int, accumulated: int
) -> None:
    q, k, v = heads(), heads(key_heads), heads(key_heads)
    out = flash.flash_attn_func(q, k, v)
    of_keys = OUT * key_heads // HEADS
    counter = BATCH * HEADS * 4
    grouped = [accumulated] * 2 if accumulated else []
    events = gradients(gpu, out, q, k, v)
    assert events[: 8 + 2 * len(grouped)] == [
        *(OUT, of_keys, of_keys, ROWS, ROWS, ROWS * SIZE, *grouped, counter, -counter),
        *(-each for each in grouped),
    ]
    assert sorted(events[-4:]) == sorted([-ROWS * SIZE, -ROWS, -ROWS, -LSE])


def test_packed_gradients_are_one_tensor(gpu: Any, flash: Any) -> None:
    packed = made(BATCH, LENGTH, 3, HEADS, SIZE)
    out = flash.flash_attn_qkvpacked_func(packed)
    assert gradients(gpu, out, packed)[:2] == [3 * OUT, ROWS]
    grouped = made(BATCH, LENGTH, HEADS + 2, SIZE)
    out = flash.flash_attn_qkvpacked_func(grouped, num_heads_q=HEADS)
    assert gradients(gpu, out, grouped)[:1] == [OUT * 6 // 4]


def test_sequences_one_behind_the_other_lie_a_block_apart(gpu: Any, flash: Any) -> None:
    starts = torch.tensor([0, 30, LENGTH], device="cuda", dtype=torch.int32)
    q = made(LENGTH, HEADS, SIZE)
    gpu.events()
    out = flash.flash_attn_varlen_func(q, q, q, starts, starts, 70, 70)
    # Three vectors: how many splits, blocks, and which sequence.
    counter = (1 + 3 * 4) * 4
    assert gpu.events() == [OUT // BATCH, LSE // BATCH, counter, -counter]
    # 100 rows and 2 blocks of 128, rounded to a block.
    rows = HEADS * 384 * 4
    assert gradients(gpu, out, q)[3:6] == [rows, rows, rows * SIZE]


def test_one_query_splits_the_keys_of_a_cache(gpu: Any, flash: Any) -> None:
    cache = made(1, 4096, 8, 128, grad=False), made(1, 4096, 8, 128, grad=False)
    q = made(1, 1, 32, 128, grad=False)
    # 8 blocks of queries; 24 of 176 keys; 14 parts are the fewest that keep 132 multiprocessors
    # 85 % as busy (14 x 8 / 132) as the best, 16 parts.
    lse, counter = 32 * 4, (1 + 3 * 4) * 4
    parts = 14 * lse
    lengths = torch.full((1,), 4000, dtype=torch.int32, device="cuda")
    events = gpu.of(lambda: flash.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths))
    assert events == [
        *(32 * 128 * 2, lse, counter, parts * 128, parts, -counter),
        *(-lse, -parts, -parts * 128),
    ]
    again = gpu.of(lambda: flash.flash_attn_with_kvcache(q, *cache, cache_seqlens=7))
    assert again[0] == 4, "a length given as a number is made a tensor"
    with pytest.raises(RuntimeError, match="seqlens_k must also be passed in"):
        flash.flash_attn_with_kvcache(q, *cache, q[:, :, :8], q[:, :, :8])


def test_what_is_scheduled_before_is_not_scheduled_again(gpu: Any, flash: Any) -> None:
    lengths = torch.full((6,), 3000, dtype=torch.int32, device="cuda")
    sizes = 6, 1, 4096, 8, 8, 64
    gpu.events()
    # A counter, and of 6 sequences, in multiples of 4: splits, blocks and order.
    assert gpu.of(lambda: flash.get_scheduler_metadata(*sizes, lengths)) == [(1 + 8 * 3) * 4]
    sizes = 6, 2, 4096, 8, 8, 64
    # What is causal has heads in the cache, too; in a window there is no order.
    metadata = flash.get_scheduler_metadata(*sizes, lengths, causal=True)
    gpu.events()
    assert metadata.shape == (1 + 8 * 4,)
    local = flash.get_scheduler_metadata(*sizes, lengths, window_size=(100, 100))
    assert local.shape == (1 + 8 * 3,)
    gpu.events()
    query, cache = made(6, 2, 8, 64, grad=False), made(6, 4096, 8, 64, grad=False)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "num_splits": 1}
    gpu.events()
    assert metadata.nbytes in gpu.of(
        lambda: flash.flash_attn_with_kvcache(query, cache, cache, **options)
    )
    options["scheduler_metadata"] = metadata
    gpu.events()
    assert metadata.nbytes not in gpu.of(
        lambda: flash.flash_attn_with_kvcache(query, cache, cache, **options)
    )
    with pytest.raises(RuntimeError, match="must divide number of heads in query"):
        flash.get_scheduler_metadata(6, 1, 4096, 8, 3, 64, lengths)
    with pytest.raises(RuntimeError, match="only supports fp16, bf16, and fp8_e4m3"):
        flash.get_scheduler_metadata(*sizes, lengths, torch.float32)


def test_paged_keys_are_counted_by_page(gpu: Any, flash: Any) -> None:
    pages = made(64, 64, 8, 128, grad=False)
    table = torch.zeros(1, 64, device="cuda", dtype=torch.int32)
    q = made(1, 1, 32, 128, grad=False)
    lengths = torch.full((1,), 4000, dtype=torch.int32, device="cuda")
    events = gpu.of(
        lambda: flash.flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=lengths, page_table=table
        )
    )
    # 32 blocks of 128 keys, which pages take: 14 parts again.
    assert events[3:5] == [14 * 32 * 4 * 128, 14 * 32 * 4]


@pytest.mark.parametrize(
    ("model", "size", "block", "causal"),
    [
        ("H100", 64, 128, False),
        ("H100", 128, 80, False),
        ("H100", 128, 64, True),
        ("A100-40GB", 64, 128, False),
        ("A100-40GB", 128, 64, False),
        ("RTX-3090", 256, 32, False),
    ],
)
def test_blocks_of_queries_depend_on_the_gpu(
    on: Any, flash: Any, model: str, size: int, block: int, causal: bool
) -> None:
    gpu = on(model)
    q = heads(size=size)
    out = flash.flash_attn_func(q, q, q, causal=causal)
    rows = -(-LENGTH // block) * block
    assert gradients(gpu, out, q)[3] == BATCH * HEADS * rows * 4


def test_floats_of_eight_bits_have_an_output_of_two_bytes(gpu: Any, flash: Any) -> None:
    q = made(BATCH, LENGTH, HEADS, SIZE, grad=False).to(torch.float8_e4m3fn)
    with torch.no_grad():
        assert gpu.of(lambda: flash.flash_attn_func(q, q, q))[:2] == [OUT, LSE]


@pytest.mark.parametrize(
    ("model", "change", "sentence"),
    [
        ("T4", {}, "only supports Ampere GPUs or newer"),
        ("A100-40GB", {"dtype": torch.float8_e4m3fn}, "only supports fp16 and bf16"),
        ("H100", {"size": 60}, "should be a multiple of 8"),
        ("H100", {"dtype": torch.float32}, "fp16, bf16, and fp8_e4m3"),
    ],
)
def test_what_the_library_refuses_is_refused(
    on: Any, flash: Any, model: str, change: dict[str, Any], sentence: str
) -> None:
    on(model)
    dtype = change.get("dtype", torch.half)
    q = made(1, 8, 4, change.get("size", 64), grad=False).to(dtype)
    with pytest.raises(RuntimeError, match=sentence):
        flash.flash_attn_func(q, q, q)


def test_where_values_are_computed_they_are_those_of_attention(flash: Any) -> None:
    with simulate("H100", real_values=True):
        q, k, v = (
            torch.randn(1, 12, 4, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        out = flash.flash_attn_func(q, k, v, causal=True)
        got = torch.autograd.grad(out.sum(), (q, k, v))
        host = [each.detach().cpu().float().transpose(1, 2).requires_grad_() for each in (q, k, v)]
        expected = attend(host[0], host[1], host[2], is_causal=True)
        seen = out.cpu().float().transpose(1, 2)
        torch.testing.assert_close(seen, expected, rtol=0.02, atol=0.02)
        for one, other in zip(got, torch.autograd.grad(expected.sum(), host), strict=True):
            seen = one.cpu().float().transpose(1, 2)
            torch.testing.assert_close(seen, other, rtol=0.05, atol=0.05)


def test_transformers_finds_it_where_it_is_named() -> None:
    utils = pytest.importorskip("transformers.utils")
    with SimulatedGPU("H100", stand_ins=("flash-attn-3",)).active():
        assert utils.is_flash_attn_3_available()
    with simulate():
        assert not utils.is_flash_attn_3_available()
