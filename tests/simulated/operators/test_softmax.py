"""Softmax allocates the temporaries of SoftMax.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MATRIX = 64 * 32 * 4


def gradient_events(gpu: Any, output: Tensor, x: Tensor, gradient: Tensor) -> list[int]:
    events: list[int] = gpu.of(lambda: torch.autograd.grad(output, x, gradient))
    return events


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def test_backward_multiplies_the_gradient_with_the_output_first(on: Any) -> None:
    gpu = on()
    x, gradient = made(64, 32), torch.randn(64, 32, device="cuda")
    # The result, and grad * output beside it; the logarithm's needs no product.
    assert gradient_events(gpu, x.softmax(-1), x, gradient) == [MATRIX, MATRIX, -MATRIX]
    assert gradient_events(gpu, x.log_softmax(-1), x, gradient) == [MATRIX]


def test_softmax_of_a_row_has_the_measured_peak(on: Any) -> None:
    # linkedin/Liger-Kernel 5d25e468, 4,096 numbers on an RTX 3090: 0.09375 MiB, which is six rows:
    # input, its gradient so far, output, gradient, product, result.
    on("RTX-3090")
    x = made(4096)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        y = x.softmax(-1)
        y.backward(torch.ones_like(y), retain_graph=True)
    assert torch.cuda.max_memory_allocated() == 98_304


def test_the_product_of_halves_is_float16(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    half = MATRIX // 2
    assert gradient_events(gpu, x.softmax(-1), x, gradient) == [half, half, -half]


def test_a_strided_input_is_copied_beside_the_output(on: Any) -> None:
    gpu = on()
    x = torch.randn(32, 64, device="cuda").t()
    assert gpu.of(lambda: x.softmax(-1)) == [MATRIX, MATRIX, -MATRIX]
    assert gpu.of(lambda: functional.log_softmax(x, 0)) == [MATRIX, MATRIX, -MATRIX]


def test_a_product_with_the_gradients_strides_is_copied(on: Any) -> None:
    gpu = on()
    x, gradient = made(64, 32), torch.randn(32, 64, device="cuda").t()
    assert gradient_events(gpu, x.softmax(-1), x, gradient) == [
        MATRIX, MATRIX, MATRIX, -MATRIX, -MATRIX,
    ]  # fmt: skip


def test_log_softmax_copies_an_expanded_gradient(on: Any) -> None:
    gpu = on()
    x, gradient = made(64, 32), torch.ones(1, 1, device="cuda").expand(64, 32)
    assert gradient_events(gpu, x.softmax(-1), x, gradient) == [MATRIX, MATRIX, -MATRIX]
    assert gradient_events(gpu, x.log_softmax(-1), x, gradient) == [MATRIX, MATRIX, -MATRIX]


def test_float16_to_float32_is_one_kernel_and_bfloat16_is_cast_first(on: Any) -> None:
    gpu = on()
    half, brain = (
        torch.randn(64, 32, device="cuda", dtype=dtype).requires_grad_()
        for dtype in (torch.float16, torch.bfloat16)
    )
    assert gpu.of(lambda: functional.softmax(half, -1, dtype=torch.float32)) == [MATRIX]
    assert gpu.of(lambda: functional.log_softmax(half, -1, dtype=torch.float32)) == [MATRIX]
    assert gpu.of(lambda: functional.softmax(brain, -1, dtype=torch.float32)) == [
        MATRIX, MATRIX, -MATRIX,
    ]  # fmt: skip
    # softmin's negative is of halves, and lives as long as the result's graph.
    assert gpu.of(lambda: functional.softmin(half, -1, dtype=torch.float32)) == [
        MATRIX // 2, MATRIX, -MATRIX // 2,
    ]  # fmt: skip


def test_the_gradient_of_float16_to_float32_is_float16(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 32, device="cuda", dtype=torch.float16, requires_grad=True)
    gradient = torch.randn(64, 32, device="cuda")
    y = functional.softmax(x, -1, dtype=torch.float32)
    # The result of halves, and grad * output in float32 beside it.
    assert gradient_events(gpu, y, x, gradient) == [MATRIX // 2, MATRIX, -MATRIX]
