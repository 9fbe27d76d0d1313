"""Weights of 4 and 8 bits: bitsandbytes' operators, whose definitions stand in for the library."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_gpumem.values.errors import UnknownValueError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes defines them itself"
)

DEFINITIONS = (
    "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
    "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage)"
    " -> (Tensor, Tensor)",
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type,"
    " Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None,"
    " Tensor? absmax_offset=None) -> Tensor",
    "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
    "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None,"
    " ScalarType? dtype=None) -> Tensor",
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Define the operators, and use their own kernels up to 8 rows as on an A100."""
    kernels = SimpleNamespace(
        _gemm_4bit_custom_max_m=1536,
        _gpu_dispatch_props=cache(lambda index: (108, 8, 0)),
        _gemm_4bit_use_custom_fn=cache(lambda index, dtype, rows, n, k: rows <= 8),
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes.backends.cuda.ops", kernels)
    library = torch.library.Library("bitsandbytes", "FRAGMENT")
    for definition in DEFINITIONS:
        library.define(definition)
    yield
    library._destroy()


def test_scales_are_allocated_before_the_codes(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    weight = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    code = torch.zeros(256, device="cuda")
    ops = torch.ops.bitsandbytes
    # 4,096 numbers: 64 scales of 4 bytes for blocks of 64, and half a byte or one byte for each.
    kept = []
    taken = gpu.of(lambda: kept.append(ops.quantize_4bit(weight, 64, "nf4", torch.uint8)))
    assert taken == [256, 2048]
    taken = gpu.of(lambda: kept.append(ops.quantize_blockwise(weight, code, 64)))
    assert taken == [256, 4096]
    assert [each.shape for each in kept[0]] == [(2048, 1), (64,)]


def test_products_of_8_bits_are_made_in_32_bits_and_in_halves(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    rows = torch.zeros(16, 512, device="cuda", dtype=torch.float16)
    ops, kept = torch.ops.bitsandbytes, []
    # A scale of each row comes first: the events of the dry device, 2.15.
    assert gpu.of(lambda: kept.append(ops.int8_vectorwise_quant(rows))) == [64, 8192]
    packed, scales, _ = kept[0]
    taken = gpu.of(lambda: kept.append(ops.int8_scaled_mm(packed, packed, scales, scales)))
    assert taken == [1024, 512, -1024]
    bfloat16 = {"dtype": torch.bfloat16}
    taken = gpu.of(
        lambda: kept.append(ops.int8_scaled_mm(packed, packed, scales, scales, **bfloat16))
    )
    assert taken == [1024, 512, 512, -512, -1024]
    # Which columns have outliers decides what is multiplied in halves.
    with pytest.raises(UnknownValueError):
        ops.int8_vectorwise_quant(rows.relu().repeat(100, 1), threshold=6.0)


@pytest.mark.parametrize(
    ("rows", "unpacked"), [(8, False), (16, True)], ids=["its own kernel", "linear"]
)
def test_weights_are_dequantised_if_there_is_no_kernel(on: Any, rows: int, unpacked: bool) -> None:
    gpu = on("A100-40GB", "2.13")
    given = torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(given, given)  # cuBLAS keeps its workspace
    packed = torch.zeros(1024, 1, device="cuda", dtype=torch.uint8)
    nested = torch.zeros(16, device="cuda", dtype=torch.uint8)
    one = torch.zeros(1, device="cuda")

    def multiply() -> torch.Tensor:
        result: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit(
            given, packed, [32, 64], one, 64, "nf4",
            absmax_8bit=nested, absmax_code=one, absmax_offset=one,
        )  # fmt: skip
        return result

    kept = []
    taken = gpu.of(lambda: kept.append(multiply()))
    result = rows * 32 * 2
    # 16 scales as float32, twice, and 32 x 64 weights of 2 bytes; all but the result is temporary.
    expected = [64, 64, 4096, result, -4096, -64, -64] if unpacked else [result]
    assert sorted(taken) == sorted(expected)
    assert [size for size in taken if size > 0] == [size for size in expected if size > 0]
