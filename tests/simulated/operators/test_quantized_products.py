"""Products of quantized matrices: inputs that CUDA refuses, and workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
RESULT = 32 * 48 * 2
HOPPER = 32 * 1024 * 1024


def eight_bits(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.zeros(shape, device="cuda").to(dtype)


def scaled(
    a: Tensor | None = None,
    b: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Tensor:
    a = eight_bits(32, 64) if a is None else a
    b = eight_bits(48, 64).t() if b is None else b
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b, *(scales or (one, one)), out_dtype=dtype, **options)


def rows() -> tuple[Tensor, Tensor]:
    return torch.ones(32, 1, device="cuda"), torch.ones(1, 48, device="cuda")


def zeros(columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(columns, device="cuda", dtype=dtype)


REFUSED: dict[str, Callable[[], Tensor]] = {
    r"trailing dimension of mat1 to be divisible by 16 but got mat1 shape: \(32x41\)": lambda: (
        scaled(eight_bits(32, 41), eight_bits(48, 41).t())
    ),
    r"mat2 shape \(64x41\) must be divisible by 16": lambda: scaled(b=eight_bits(41, 64).t()),
    r"cannot be multiplied \(32x64 and 80x48\)": lambda: scaled(b=eight_bits(48, 80).t()),
    "Only multiplication of row-major and column-major": lambda: scaled(b=eight_bits(64, 48)),
    "Bias must be size 48 but got 40": lambda: scaled(bias=zeros(40, BF16)),
    "Bias is not supported when out_dtype is set to Float32": lambda: scaled(
        bias=zeros(48, BF16), dtype=torch.float32
    ),
    "Bias must be BFloat16 or Half, but got Float": lambda: scaled(bias=zeros(48, torch.float32)),
    "Bias must be Float16 to compute Half output, but got BFloat16": lambda: scaled(
        bias=zeros(48, BF16), dtype=torch.float16
    ),
    "Multiplication of two Float8_e5m2 matrices": lambda: scaled(
        eight_bits(32, 64, dtype=torch.float8_e5m2), eight_bits(48, 64, dtype=torch.float8_e5m2).t()
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_scaled_products_that_cuda_refuses(words: str) -> None:
    with simulate("H100"), pytest.raises((RuntimeError, ValueError), match=words):
        REFUSED[words]()


@pytest.mark.parametrize(
    ("model", "workspace"),
    # CUTLASS allocates a tile of 32 x 256 numbers, and its blocks' semaphores.
    [("H100", [HOPPER]), ("B200", []), ("L4", [32 * 256 * 4 + 128, -(32 * 256 * 4 + 128)])],
)
def test_cublas_scales_rows_on_hopper_alone(on: Any, model: str, workspace: list[int]) -> None:
    gpu = on(model, "2.15")
    a, b, scales = eight_bits(32, 64), eight_bits(48, 64).t(), rows()
    events = gpu.of(lambda: torch._scaled_mm(a, b, *scales, out_dtype=BF16))
    assert events == [RESULT, *workspace]


def test_cublas_scales_tensors_on_every_gpu(on: Any) -> None:
    for model in ("L4", "H100", "B200"):
        assert max(on(model, "2.15").of(scaled)) >= 1024 * 1024


def test_scaled_mm_v2_has_the_same_workspace(on: Any) -> None:
    multiply = getattr(torch.nn.functional, "scaled_mm", None)
    if multiply is None:
        pytest.skip("came with torch 2.10")
    gpu = on("H100")
    a, b, one = eight_bits(32, 64), eight_bits(48, 64).t(), torch.ones((), device="cuda")
    by_tensor = torch.nn.functional.ScalingType.TensorWise

    def scale(b: Tensor) -> Tensor:
        result: Tensor = multiply(a, b, one, by_tensor, one, by_tensor, output_dtype=BF16)
        return result

    assert gpu.of(lambda: scale(b))[:2] == [RESULT, HOPPER]
    with pytest.raises(ValueError, match="must be divisible by 16"):
        scale(eight_bits(41, 64).t())


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "words"),
    [
        (16, 64, 48, r"self\.size\(0\) needs to be greater than 16, but got 16"),
        (32, 41, 48, r"self\.size\(1\) needs .* a multiple of 8, but got 41"),
        (32, 64, 41, r"mat2\.size\(1\) needs .* a multiple of 8, but got 41"),
    ],
)
def test_int_mm_has_the_size_limits_of_cublas(
    rows: int, inner: int, columns: int, words: str
) -> None:
    with simulate("A100-40GB"), pytest.raises(RuntimeError, match=words):
        torch._int_mm(integers(rows, inner), integers(inner, columns))


def test_int_mm_checks_its_out_argument() -> None:
    with simulate("A100-40GB"):
        a, b = integers(32, 64), integers(64, 48)
        assert torch._int_mm(a, b).shape == (32, 48)
        with pytest.raises(RuntimeError, match=r"Expected result\.size\(1\) to be 48 but got 40"):
            torch._int_mm(a, b, out=integers(32, 40, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="Expected result to be contiguous"):
            torch._int_mm(a, b, out=integers(48, 32, dtype=torch.int32).t())
        with pytest.raises(RuntimeError, match="expected scalar type Char but found Byte"):
            torch._int_mm(a.to(torch.uint8), b)


def test_weights_of_eight_bits_are_multiplied_in_float32(on: Any) -> None:
    gpu = on()
    weight, x = integers(128, 256), torch.zeros(4, 256, device="cuda")
    scales, narrow = torch.ones(128, device="cuda"), x.to(BF16)
    multiply = torch.ops.aten._weight_int8pack_mm
    assert gpu.of(lambda: multiply(x, weight, scales)) == [4 * 128 * 4]
    casts = [x.nbytes, scales.nbytes, 4 * 128 * 4]
    assert gpu.of(lambda: multiply(narrow, weight, scales.to(BF16)))[1:] == [
        *casts,
        4 * 128 * 2,
        *[-each for each in reversed(casts)],
        -128 * 2,
    ]


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float16, 144), (torch.int8, 160)])
def test_matrices_with_2_4_sparsity_are_compressed(
    on: Any, dtype: torch.dtype, columns: int
) -> None:
    gpu = on("H100")
    matrix, dense = (torch.zeros(256, 256, device="cuda", dtype=dtype) for _ in range(2))
    packed = torch._cslt_compress(matrix[:128])
    assert packed.shape == (128, columns)
    assert torch._cslt_sparse_mm(packed, dense.t()).shape == (128, 256)
    assert gpu.of(lambda: torch._cslt_compress(matrix)) == [256 * columns * dtype.itemsize]
