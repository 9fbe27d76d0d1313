"""Numbers of another type than the kernel's: bases of powers, and complex numbers by parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

REAL, COMPLEX = 400 * 4, 400 * 8
PART = [128 * 16, 4, -4, -128 * 16]
"""2048 values per thread of one block, four numbers each of 128 blocks; and a semaphore."""


def test_abs_and_angle_are_real_parts_of_complex_results(on: Any) -> None:
    gpu = on()
    x = torch.zeros(20, 20, dtype=torch.complex64, device="cuda")
    assert gpu.of(x.abs) == [REAL, COMPLEX, -COMPLEX]
    assert gpu.of(x.angle) == [COMPLEX, REAL, -COMPLEX]
    assert gpu.of(x.real.abs) == gpu.of(x.real.angle) == [REAL]


def test_a_complex_variance_is_the_sum_of_both_parts_variances(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.zeros(5, 5, 5, dtype=torch.complex64, device="cuda")
    assert gpu.of(lambda: x.var(1)) == [100, 100, 100, -100, -100]
    # Of each part variance and mean; the mean is complex.
    means = [100, 100, 100, 100, 100, 200, -100, -100, -100, -100]
    assert gpu.of(lambda: torch.std_mean(x, 1)) == means
    large = torch.zeros(1 << 20, dtype=torch.complex64, device="cuda")
    assert gpu.of(large.std) == [4, *PART, 4, *PART, 4, -4, -4]
    assert gpu.of(large.real.std) == [4, *PART]


def test_parts_of_complex_columns_are_strided(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.zeros(1 << 14, 64, dtype=torch.complex64, device="cuda")
    # 16 bytes for each of 64 columns, 32 threads and 64 blocks; two blocks beside each other.
    part = [64 * 64 * 32 * 16, 2 * 4, -2 * 4, -64 * 64 * 32 * 16]
    # Elements beside each other would be read four at a time.
    assert gpu.of(lambda: x.var(0)) == [256, *part, 256, *part, 256, -256, -256]


@pytest.mark.parametrize(
    ("dtype", "exponent", "itemsize"),
    [(torch.int64, 0.5, 4), (torch.bool, 2, 8), (torch.float32, 1j, 8)],
)
def test_a_base_is_converted_to_the_type_of_the_power(
    on: Any, dtype: torch.dtype, exponent: complex, itemsize: int
) -> None:
    gpu = on()
    x = torch.zeros(400, dtype=dtype, device="cuda")
    size = 400 * itemsize
    assert gpu.of(lambda: x**exponent) == [size, size, -size]


def test_a_base_of_the_powers_type_is_read_as_it_is(on: Any) -> None:
    gpu = on()
    numbers = torch.zeros(400, dtype=torch.int64, device="cuda")
    assert gpu.of(lambda: numbers**2) == [3200]
    assert gpu.of(lambda: numbers.float() ** 2.5) == [REAL, REAL, -REAL]
    assert gpu.of(lambda: 2.0 ** numbers.float()) == [REAL, REAL, 8, -8, -REAL]


def test_dropout_of_complex_numbers_has_real_noise(on: Any) -> None:
    gpu = on()
    x = torch.zeros(400, dtype=torch.complex64, device="cuda", requires_grad=True)
    assert gpu.of(lambda: functional.dropout(x, 0.5)) == [REAL, COMPLEX]
    assert gpu.of(lambda: functional.dropout(x, 0.5, training=False)) == []


def test_logsumexp_of_complex_numbers_takes_the_real_maximum(on: Any) -> None:
    gpu = on()
    x = torch.zeros(20, 20, dtype=torch.complex64, device="cuda")
    # Highest, its size, whether that is infinite; differences, their sum.
    events = [80, 80, 20, -20, -80, COMPLEX, 160, -COMPLEX, -80]
    assert gpu.of(lambda: torch.logsumexp(x, 1)) == events


def test_norms_of_complex_slices_are_real_and_their_factors_complex(on: Any) -> None:
    gpu = on()
    x = torch.zeros(20, 20, dtype=torch.complex64, device="cuda")
    assert gpu.of(lambda: torch.renorm(x, 2, 0, 1.0)) == [COMPLEX, 80, 160, -160, -80]
