"""Partial results of reductions, against bytes recorded on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.operators.reductions import launches

H100 = (132, 2048)


@pytest.mark.parametrize(
    ("columns", "accumulated", "recorded"),
    [
        pytest.param(2560, 4, (10_485_760, 16), id="sum"),
        pytest.param(10_000, 4, (41_156_608, 16), id="sum of logits"),
        pytest.param(10_000, 16, (164_626_432, 16), id="max with index"),
    ],
)
def test_sums_of_strided_rows_have_the_recorded_buffers(
    columns: int, accumulated: int, recorded: tuple[int, int]
) -> None:
    # kkaitlyn111/cs336-a2-systems, ctx128 full step, H100: logits computed transposed.
    shape, strides = (4, 128, columns), (128, 1, 512)
    assert launches(shape, strides, (2,), 4, accumulated, *H100) == (recorded,)


def test_a_sum_of_all_elements_has_a_buffer_and_semaphores(on: Any) -> None:
    # silmont2000/assignment2-systems, trace_peak_memory: output, buffer, semaphore.
    gpu = on("RTX-4060", "2.6")
    tensor = torch.randn(8, 4096, 16, device="cuda")
    assert gpu.of(tensor.sum) == [4, 256, 4, -4, -256]


def test_adjacent_dims_are_reduced_as_one(on: Any) -> None:
    # As torch's own code allocates on the dry device: 4 x 3 columns are 12, read by fours.
    gpu = on()
    tensor = torch.randn(1 << 18, 4, 3, device="cuda")
    assert gpu.of(lambda: tensor.sum(0)) == [48, 98_304, 8, -8, -98_304]


def test_contiguous_rows_need_no_buffer(on: Any) -> None:
    gpu = on()
    tensor = torch.randn(4096, 1024, device="cuda")
    assert gpu.of(lambda: tensor.sum(-1)) == [4096 * 4]


def test_a_small_reduction_needs_no_buffer(on: Any) -> None:
    gpu = on()
    tensor = torch.randn(64, 64, device="cuda")
    assert gpu.of(tensor.mean) == [4]


def test_blocks_share_a_sum_from_256_values_per_thread() -> None:
    # One block of 512 threads; 16 blocks of at least 16 values per thread each.
    assert launches((512 * 256,), (1,), (0,), 4, 4, *H100) == ((16 * 4, 4),)
    assert launches((512 * 255,), (1,), (0,), 4, 4, *H100) == (None,)


def test_variance_keeps_four_numbers_per_partial_result(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    tensor = torch.randn(1 << 20, device="cuda")
    # 2048 values per thread of one block; 128 blocks of 16 are less than the 432 that fit.
    assert gpu.of(tensor.var) == [4, 128 * 16, 4, -4, -128 * 16]


def test_sums_of_booleans_are_converted_to_integers(on: Any) -> None:
    gpu = on()
    truth = torch.ones(32, 32, dtype=torch.bool, device="cuda")
    assert gpu.of(truth.sum) == [8, 1024 * 8, -1024 * 8]
    numbers = torch.ones(32, 32, device="cuda")
    assert gpu.of(numbers.count_nonzero) == [1024, 8, 1024 * 8, -1024 * 8, -1024]
    assert gpu.of(truth.count_nonzero) == [8, 1024 * 8, -1024 * 8]
    assert gpu.of(truth.trace) == [8, 32 * 8, -32 * 8]
    assert gpu.of(numbers.trace) == [4]


def test_16_bit_sums_in_float_are_not_converted(on: Any) -> None:
    gpu = on()
    halves = torch.ones(32, 32, dtype=torch.bfloat16, device="cuda")
    assert gpu.of(lambda: halves.sum(dtype=torch.float32)) == [4]
    assert gpu.of(lambda: halves.sum(dtype=torch.float64)) == [8, 1024 * 8, -1024 * 8]


def test_the_maximum_of_all_elements_has_no_index_buffer(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.ones(1 << 20, device="cuda")
    # 2048 values per thread of one block of 512: 128 blocks of 16.
    assert gpu.of(x.max) == [4, 128 * 4, 4, -4, -128 * 4]
    assert gpu.of(x.argmax) == [8, 128 * 16, 4, -4, -128 * 16]


def test_argmax_of_a_strided_tensor_copies_it(on: Any) -> None:
    gpu = on()
    x = torch.ones(32, 16, device="cuda").t()
    assert gpu.of(x.argmax) == [8, 32 * 16 * 4, -32 * 16 * 4]


def test_inputs_that_32_bits_cannot_index_are_reduced_in_parts(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.empty(3 << 30, dtype=torch.bfloat16, device="cuda")
    # Halves of 3 GiB, halves of those; each with 432 blocks of 512 threads, at most 256 values
    # per thread: 805,306,368 / 512 / 256 = 6144 blocks. The parts add up in float.
    part = [6144 * 4, 4, -4, -6144 * 4]
    assert gpu.of(x.sum) == [2, 4, *part * 4, -4]
    del x
    y = torch.empty(1 << 30, device="cuda")
    part = [4096 * 4, 4, -4, -4096 * 4]
    assert gpu.of(y.sum) == [4, *part * 2]
    # A value with its index does not fit into the output: it has its own buffer.
    part = [4096 * 16, 4, -4, -4096 * 16]
    assert gpu.of(y.argmax) == [8, 16, *part * 2, -16]


def test_extremes_of_all_elements_are_reduced_as_of_one_row(on: Any) -> None:
    gpu = on()
    x = torch.zeros(32, 16, device="cuda").t()
    copy = 32 * 16 * 4
    assert gpu.of(x.max) == gpu.of(x.min) == [4, copy, -copy]
    assert gpu.of(x.aminmax) == [4, 4, copy, -copy]
    assert gpu.of(lambda: x.max(0)) == [32 * 4, 32 * 8]
    assert gpu.of(x.contiguous().max) == [4]


def test_argmax_of_a_tensor_that_is_one_row_copies_nothing(on: Any) -> None:
    gpu = on()
    assert gpu.of(torch.zeros(32, 16, 2, device="cuda")[..., 0].argmax) == [8]
    assert gpu.of(torch.zeros((), device="cuda").expand(32, 16).argmin) == [8]
