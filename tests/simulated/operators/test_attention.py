"""scaled_dot_product_attention chooses CUDA's kernel and makes its allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import find_gpu

BATCH, LENGTH, HEADS, SIZE = 2, 100, 4, 64


def inputs(
    dtype: torch.dtype, size: int = SIZE, length: int = LENGTH, heads: int = HEADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def made() -> torch.Tensor:
        shape = (BATCH, length, heads, size)
        made = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        return made.transpose(1, 2)

    return made(), made(), made()


def kernel_of(output: torch.Tensor) -> str:
    name = output.grad_fn.name() if output.grad_fn is not None else ""
    return next((k for k in ("Flash", "Efficient", "Cudnn") if k in name), "math")


@pytest.mark.parametrize(
    ("model", "version", "dtype", "kernel"),
    [
        ("A100-40GB", "2.6", torch.bfloat16, "Flash"),
        ("A100-40GB", "2.6", torch.float32, "Efficient"),
        ("A100-40GB", "2.6", torch.float64, "math"),
        ("T4", "2.6", torch.float16, "Efficient"),
        ("T4", "2.6", torch.bfloat16, "math"),
        ("H100", "2.6", torch.bfloat16, "Flash"),
        ("H100", "2.11", torch.bfloat16, "Cudnn"),
    ],
)
def test_the_kernel_depends_on_gpu_release_and_dtype(
    on: Any, model: str, version: str, dtype: torch.dtype, kernel: str
) -> None:
    on(model, version)
    assert kernel_of(attend(*inputs(dtype))) == kernel


@pytest.mark.parametrize(
    ("model", "version", "size", "dropout", "kernel"),
    [
        # 2.11 as an H100 ran it, 2.15 by torch's own code on the dry device.
        ("H100", "2.11", 256, 0.0, "Cudnn"),
        ("H100", "2.11", 64, 0.1, "Cudnn"),
        ("B200", "2.11", 256, 0.0, "Flash"),
        ("H100", "2.15", 256, 0.0, "Cudnn"),
        ("H100", "2.15", 192, 0.0, "Flash"),
        ("H100", "2.15", 64, 0.1, "Flash"),
        ("H100", "2.15", 64, 0.125, "Cudnn"),
    ],
)
def test_cudnn_is_chosen_by_head_size_and_dropout(
    on: Any, model: str, version: str, size: int, dropout: float, kernel: str
) -> None:
    on(model, version)
    output = attend(*inputs(torch.bfloat16, size=size), dropout_p=dropout)
    assert kernel_of(output) == kernel


def test_a_mask_rules_out_flash(on: Any) -> None:
    on()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda")
    assert kernel_of(attend(*inputs(torch.bfloat16), attn_mask=mask)) == "Efficient"


def test_large_heads_train_without_flash_on_consumer_gpus(on: Any) -> None:
    on("RTX-4090", "2.6")
    assert kernel_of(attend(*inputs(torch.bfloat16, size=224))) == "Efficient"
    assert kernel_of(attend(*inputs(torch.bfloat16, size=192))) == "Flash"


def test_sdpa_kernel_selects_the_kernel(on: Any) -> None:
    on()
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(attend(*inputs(torch.bfloat16))) == "math"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel_of(attend(*inputs(torch.bfloat16))) == "Efficient"


OUT = BATCH * LENGTH * HEADS * SIZE * 2
LSE = BATCH * HEADS * LENGTH * 4


def test_flash_keeps_its_rng_state_on_the_gpu_since_2_7(on: Any) -> None:
    older = on("A100-40GB", "2.6")
    q, k, v = inputs(torch.bfloat16)
    assert older.of(lambda: attend(q, k, v)) == [OUT, LSE]
    newer = on("A100-40GB", "2.9")
    q, k, v = inputs(torch.bfloat16)
    assert len(newer.of(lambda: attend(q, k, v))) == 4


@pytest.mark.parametrize(
    ("version", "size", "rounded"),
    [
        ("2.6", SIZE, SIZE),
        *(("2.6", 136, 160), ("2.10", 136, 160), ("2.11", 136, 192)),
        *(("2.6", 200, 224), ("2.7", 200, 256), ("2.11", 200, 256)),
    ],
)
def test_flash_backward_accumulates_in_float32(
    on: Any, version: str, size: int, rounded: int
) -> None:
    """CUDA builds of these releases on the dry device."""
    gpu = on("A100-40GB", version)
    output = attend(*inputs(torch.bfloat16, size, length=150))
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    matrix = BATCH * 150 * HEADS * size * 2
    rows = BATCH * HEADS * 256  # queries rounded up to a multiple of 128
    accumulator = rows * rounded * 4
    assert events[:7] == [
        matrix, matrix, matrix, rows * 4, accumulator, -accumulator, -rows * 4,
    ]  # fmt: skip


def test_short_queries_split_the_keys(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16)
    events = gpu.of(lambda: attend(q, k, k))
    # 8 blocks for 216 places and 32 blocks of keys: 16 splits fill 128 / 216 of a wave, as much as
    # 32 splits fill of two; 11, the next below, fill less than 0.85 of that.
    assert events == [1024, 32, 16 * 8 * 4, 16 * 8 * 64 * 4, -16 * 8 * 4, -16 * 8 * 64 * 4, -32]


def test_the_efficient_backward_has_the_recorded_events(on: Any) -> None:
    # cranberrii/ftcourse: 64 heads in all, 500 queries, heads of 64, float32.
    gpu = on("A100-40GB", "2.6")
    q, k, v = inputs(torch.float32, length=500, heads=32)
    output = attend(q, k, v)
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    matrix = 8_192_000
    assert events[:10] == [
        matrix, matrix, matrix,
        matrix, 128_000, 128_000, -128_000, -matrix,
        8_396_800, -128_000,
    ]  # fmt: skip


@pytest.mark.parametrize(("heads", "length"), [(1, 500), (32, 1)])
def test_sums_of_one_head_or_one_query_need_no_copy(on: Any, heads: int, length: int) -> None:
    # (grad_out * out).sum(-1).transpose(-2, -1).contiguous() of attention_backward.cu
    gpu = on()
    q, k, v = inputs(torch.float32, length=length, heads=heads)
    output = attend(q, k, v)
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    matrix, sums = q.nbytes, q.nbytes // 64
    assert events[:6] == [matrix, matrix, matrix, matrix, sums, -matrix]
    assert events[7] == -sums


@pytest.mark.skipif(torch.__version__ < "2.11", reason="varlen_attn is newer")
def test_packed_sequences_are_128_rows_apart_in_flash_backward(on: Any) -> None:
    from torch.nn.attention.varlen import varlen_attn

    gpu = on()
    rows = torch.randn(64, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    output: Any = varlen_attn(rows, rows, rows, starts, starts, 32, 32)
    grad = torch.ones_like(output)
    apart, head = 64 + 2 * 128, 32  # rows, and a head's size, rounded up
    temporaries = [2 * apart * 4, 2 * apart * head * 4]

    events = gpu.of(lambda: output.backward(grad))

    at = events.index(temporaries[0])
    assert events[at : at + 4] == [*temporaries, -temporaries[1], -temporaries[0]]


@pytest.mark.parametrize(
    ("model", "capability", "size", "dropout", "peak"),
    [
        ("T4", (7, 5), 96, 0.0, 8_276_992),  # 128x64_k128, in registers
        ("T4", (7, 5), 136, 0.0, 21_006_336),  # 128x64_k65536
        ("A10", (8, 6), 96, 0.0, 8_276_992),  # 128x64_k96, in registers
        ("A10", (8, 6), 96, 0.1, 12_471_296),  # 64x64_k128: k96 has no dropout
        ("A10", (8, 6), 128, 0.0, 14_520_320),  # 64x64_k128: 128x128_k128 takes more than 99 KiB
        ("A10", (8, 6), 136, 0.0, 21_006_336),
        ("A100-40GB", (8, 0), 128, 0.0, 10_324_480),  # 128x128_k128, in registers
        ("B200", (10, 3), 128, 0.0, 10_324_480),
        ("B200", (12, 0), 96, 0.0, 12_472_320),  # k96 is for 8.6 and 8.9 alone
    ],
)
def test_efficient_backward_takes_the_first_kernel_that_fits(
    model: str, capability: tuple[int, int], size: int, dropout: float, peak: int
) -> None:
    """Kernels of cutlassB.h; peaks of torch 2.15.0+cu132 on the dry device."""
    given = replace(find_gpu(model), compute_capability=capability)
    with simulate(given, torch_version="2.15") as gpu:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            q, k, v = inputs(torch.float16, size=size, length=500)
            attend(q, k, v, dropout_p=dropout).sum().backward()
        assert gpu.peak_allocated == peak


def test_the_math_kernel_materialises_the_scores(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    q, k, v = (tensor.detach() for tensor in inputs(torch.float64))
    scores = BATCH * HEADS * LENGTH * LENGTH * 8
    assert gpu.of(lambda: attend(q, k, v)).count(scores) == 2  # the product and its softmax


def test_heads_of_odd_size_are_padded(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    q, k, v = (tensor.detach() for tensor in inputs(torch.bfloat16, size=60))
    padded = BATCH * LENGTH * HEADS * 64 * 2
    assert gpu.of(lambda: attend(q, k, v))[:4] == [padded, padded, padded, padded]


@pytest.mark.parametrize(("model", "products"), [("A100-40GB", 0), ("T4", 0), ("V100-32GB", 3)])
def test_wide_heads_have_float32_products_before_turing(on: Any, model: str, products: int) -> None:
    # As torch's own code allocates on the dry device.
    gpu = on(model)
    q, k, v = inputs(torch.float16, size=256, length=150)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        output = attend(q, k, v)
    gradient = torch.ones_like(output)
    gpu.events()
    torch.autograd.grad(output, (q, k, v), gradient)
    assert gpu.events().count(BATCH * HEADS * 150 * 256 * 4) == products


def grouped(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = inputs(dtype)[0]
    key, value, _ = inputs(dtype, heads=heads)
    return query, key, value


@pytest.mark.parametrize(
    ("version", "heads", "enable_gqa", "kernel"),
    [
        ("2.6", 2, True, "math"),
        ("2.6", HEADS, True, "Efficient"),
        ("2.13", 2, True, "math"),
        ("2.13", 1, False, "math"),
        ("2.14", 2, True, "Efficient"),
        ("2.14", 1, False, "Efficient"),
    ],
)
def test_efficient_kernel_takes_fewer_heads_of_keys_since_2_14(
    on: Any, version: str, heads: int, enable_gqa: bool, kernel: str
) -> None:
    on("A100-40GB", version)
    query, key, value = grouped(heads, torch.float32)
    output = attend(query, key, value, enable_gqa=enable_gqa)
    assert kernel_of(output) == kernel
    by_query, by_key, by_value = torch.autograd.grad(output.sum(), (query, key, value))
    assert by_query.shape == query.shape
    assert by_key.shape == by_value.shape == key.shape


@pytest.mark.parametrize(("version", "kernel"), [("2.13", "math"), ("2.14", "Flash")])
def test_one_head_of_keys_needs_no_enable_gqa_since_2_14(
    on: Any, version: str, kernel: str
) -> None:
    on("A100-40GB", version)
    assert kernel_of(attend(*grouped(1, torch.bfloat16))) == kernel


def test_efficient_backward_of_groups_sums_gradients_per_head_of_queries(on: Any) -> None:
    gpu = on("A100-40GB", "2.14")
    output = attend(*grouped(2, torch.float32), enable_gqa=True)
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    matrix, rows = BATCH * LENGTH * HEADS * SIZE * 4, BATCH * LENGTH * HEADS * 4
    # Per batch and head: two blocks of 64 of the 100 queries, 64 x 64 floats and 16 bytes each.
    workspace = BATCH * HEADS * 2 * (64 * 64 * 4 + 16)
    assert events[:14] == [
        matrix, matrix // 2, matrix // 2,
        matrix, matrix,
        matrix, rows, rows, -rows, -matrix,
        workspace, -rows, -workspace, -matrix,
    ]  # fmt: skip


def test_efficient_backward_copies_a_gradient_of_another_layout(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    output = attend(*inputs(torch.float32))
    matrix = BATCH * LENGTH * HEADS * SIZE * 4
    by_length = torch.ones_like(output)
    by_head = torch.ones(output.shape, device="cuda")
    copied = gpu.of(lambda: output.backward(by_head, retain_graph=True)).count(matrix)
    assert copied == gpu.of(lambda: output.backward(by_length)).count(matrix) + 1


class Untrained(torch.autograd.Function):
    """A copy whose input gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize(
    ("backend", "has_gradient"),
    [
        (SDPBackend.FLASH_ATTENTION, False),
        (SDPBackend.EFFICIENT_ATTENTION, False),
        (SDPBackend.CUDNN_ATTENTION, True),
    ],
)
def test_without_a_gradient_only_cudnn_allocates_some(
    on: Any, backend: SDPBackend, has_gradient: bool
) -> None:
    """As torch 2.15.0+cu132 does; cuDNN's gradients are as they were allocated."""
    gpu = on("A100-40GB", "2.15")
    query, key, value = (
        torch.ones(1, 2, 128, 64, device="cuda", dtype=torch.half, requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(backend):
        output = Untrained.apply(attend(query, key, value))  # type: ignore[no-untyped-call]
    loss = output.sum()
    allocated = [size for size in gpu.of(loss.backward) if size > 0]
    assert allocated.count(query.nbytes) == (3 if has_gradient else 0)
    assert (query.grad is not None) is has_gradient


def test_sums_of_groups_above_2_gib_are_accumulated_in_float32(on: Any) -> None:
    gpu = on("A100-80GB", "2.14")
    shape: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    query = torch.randn(64, 8448, 32, 64, **shape).transpose(1, 2)
    key, value = (torch.randn(64, 8448, 1, 64, **shape).transpose(1, 2) for _ in range(2))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        output = attend(query, key, value)
    gradient = torch.ones_like(output)
    # One for grad_k and one for grad_v.
    assert gpu.of(lambda: output.backward(gradient)).count(64 * 8448 * 64 * 4) == 2


@pytest.mark.parametrize(("version", "random"), [("2.13", []), ("2.14", [8, 8])])
def test_efficient_attention_has_gpu_random_state_without_dropout_since_2_14(
    on: Any, version: str, random: list[int]
) -> None:
    """The events of torch 2.15.0+cu132 on an A100; with dropout there is none in any release."""
    gpu = on("A100-40GB", version)
    query = torch.zeros(2, 4, 128, 64, device="cuda")
    out = 2 * 4 * 128 * 64 * 4
    attend = torch.nn.functional.scaled_dot_product_attention
    freed = [-size for size in random]
    assert gpu.of(lambda: attend(query, query, query)) == [*random, out, *freed]
    assert gpu.of(lambda: attend(query, query, query, dropout_p=0.1)) == [out]


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_a_capture_keeps_seed_and_offset_on_the_device(on: Any, version: str) -> None:
    gpu = on("A100-40GB", version)
    given = torch.randn(2, 8, 256, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        gpu.events()  # up to 2.13 the capture's own generator
        result = attend(given, given, given)
    assert gpu.events()[:5] == [8, 8, result.nbytes, -8, -8]


@pytest.mark.parametrize(("version", "is_one"), [("2.13", False), ("2.15", True)])
def test_three_dimensions_are_a_batch_of_one_since_2_14(
    on: Any, version: str, is_one: bool
) -> None:
    gpu = on("A100-40GB", version)
    query, key, value = (torch.zeros(4, length, 8, device="cuda") for length in (3, 6, 6))
    mask = torch.zeros(3, 6, device="cuda")
    # The efficient kernel's mask has rows of eight; products begin with scaled queries.
    first = 3 * 8 * 4 if is_one else query.nbytes
    assert gpu.of(lambda: attend(query, key, value, mask))[0] == first
    query, key, value = (tensor.double().requires_grad_() for tensor in (query, key, value))
    queries, keys = query.nbytes, key.nbytes
    out = attend(query, key, value)
    gradient = torch.ones_like(out)
    events = gpu.of(lambda: out.backward(gradient))
    # Gradients of the scaled tensors; that of keys is then copied to the layout of the keys.
    copied, scaled = [keys, -keys], [queries, -queries]
    order = [*scaled, *copied] if is_one else [*copied, *scaled]
    assert events[-6:] == [keys, -keys, *order]


def test_float32_copies_of_grouped_halves_live_until_the_end(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    query, key = (
        torch.zeros(1, *shape, dtype=torch.float16, device="cuda", requires_grad=True)
        for shape in ((4, 3, 8), (2, 6, 8))
    )
    queries, keys, weights = 4 * 3 * 8, 2 * 6 * 8, 4 * 3 * 6
    with sdpa_kernel(SDPBackend.MATH):
        events = gpu.of(lambda: attend(query, key, key, enable_gqa=True))
    # Queries, keys and values; queries scaled; keys and values of each head.
    assert events[:6] == [4 * queries, 4 * keys, 4 * keys, 4 * queries, 8 * keys, 8 * keys]
    freed = [-4 * queries, -8 * keys, -4 * keys, -4 * keys, -4 * queries, -2 * weights]
    assert events[-7:] == [2 * queries, *freed]


@pytest.mark.parametrize(
    ("version", "size", "dropout", "trains", "kernel"),
    [
        # The CUDA wheels on the dry device; of 2.11 an H100 with heads of 256, and with 10 %.
        ("2.11", 256, 0.0, True, "cudnn"),
        ("2.11", 264, 0.0, True, "efficient"),
        ("2.11", 136, 0.0, True, "cudnn"),
        ("2.14", 136, 0.0, True, "flash"),
        ("2.14", 136, 0.0, False, "cudnn"),
        ("2.14", 256, 0.0, True, "cudnn"),
        ("2.11", 64, 0.1, True, "cudnn"),
        ("2.12", 64, 0.1, True, "flash"),
        ("2.12", 64, 0.125, True, "cudnn"),
    ],
)
def test_head_sizes_and_dropout_of_cudnn_depend_on_the_release(
    on: Any, version: str, size: int, dropout: float, trains: bool, kernel: str
) -> None:
    on("H100", version)
    q, k, v = (tensor.detach().requires_grad_(trains) for tensor in inputs(torch.half, size))
    call = torch.backends.cuda.SDPAParams(q, k, v, None, dropout, False, False)
    cuda = torch.backends.cuda
    usable = {
        "cudnn": cuda.can_use_cudnn_attention(call),
        "flash": cuda.can_use_flash_attention(call),
        "efficient": cuda.can_use_efficient_attention(call),
    }
    assert next(name for name, can_run in usable.items() if can_run) == kernel


@pytest.mark.parametrize(("version", "reaches"), [("2.8", 128), ("2.11", 192), ("2.14", 256)])
def test_the_kernel_of_wide_heads_on_blackwell(on: Any, version: str, reaches: int) -> None:
    on("B200", version)
    cuda = torch.backends.cuda
    widest = [128]
    for size, value_size in ((192, 128), (256, 256)):
        q, k, _ = inputs(torch.half, size)
        _, _, v = inputs(torch.half, value_size)
        call = cuda.SDPAParams(q, k, v, None, 0.0, False, False)
        widest += [size] * cuda.can_use_cudnn_attention(call)
    assert max(widest) == reaches


def test_a_mask_with_a_strided_last_dim_leaves_the_math_kernel(on: Any) -> None:
    # T5's position bias, as an H100 with torch 2.11 allocates: q, k and 32-bit scores, no padding.
    on("H100", "2.11")
    bias = torch.randn(1, LENGTH, LENGTH, HEADS, device="cuda", requires_grad=True)
    permuted = bias.permute(0, 3, 1, 2)
    assert kernel_of(attend(*inputs(torch.float32), attn_mask=permuted)) == "math"
    contiguous = permuted.contiguous()
    assert kernel_of(attend(*inputs(torch.float32), attn_mask=contiguous)) == "Efficient"


@pytest.mark.parametrize(("version", "kernel"), [("2.12", "Efficient"), ("2.13", "math")])
def test_an_unaligned_offset_rules_out_the_efficient_kernel(
    on: Any, version: str, kernel: str
) -> None:
    on("A100-40GB", version)
    numbers = torch.randn(2 * 4 * 64 * 64 + 2, device="cuda")[2:].requires_grad_()
    query = numbers.view(2, 4, 64, 64)
    assert kernel_of(attend(query, query, query)) == kernel


def test_deterministic_algorithms_with_warn_only_keep_cudnn(on: Any) -> None:
    on("H100", "2.11")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert kernel_of(attend(*inputs(torch.half))) == "Cudnn"
        torch.use_deterministic_algorithms(True)
        assert kernel_of(attend(*inputs(torch.half))) == "Flash"
    finally:
        torch.use_deterministic_algorithms(False)
