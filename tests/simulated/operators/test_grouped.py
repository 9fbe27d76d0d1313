"""Grouped products of matrices: kernels by GPU and release, and their allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate

WORKSPACE = 8_519_680
grouped = getattr(torch, "_grouped_mm", None)
pytestmark = pytest.mark.skipif(grouped is None, reason="came with torch 2.8")


def product(dtype: torch.dtype = torch.bfloat16, columns: int = 64) -> Tensor:
    """Multiply 64 tokens by four experts of 32 x ``columns``."""
    tokens = torch.rand(64, 32, device="cuda", dtype=dtype)
    experts = torch.rand(4, 32, columns, device="cuda", dtype=dtype)
    ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
    assert grouped is not None
    result: Tensor = grouped(tokens, experts, offs=ends)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_gpus_than_hopper_multiply_group_by_group(on: Any, dtype: torch.dtype) -> None:
    result = 64 * 64 * dtype.itemsize
    gpu = on("A100-40GB", "2.9")
    held: list[Tensor] = []
    events = gpu.of(lambda: held.append(product(dtype)))
    assert events.count(WORKSPACE) == 1
    assert result in events
    assert held[0].dtype is dtype


def test_rows_of_the_result_are_aligned_to_16_bytes(on: Any) -> None:
    on("A100-40GB", "2.9")
    result = product(torch.float16, 72)
    assert (result.shape, result.stride()) == ((64, 72), (72, 1))
    assert product(torch.float32, 4).stride() == (4, 1)


def test_hopper_has_one_kernel_for_half_precision(on: Any) -> None:
    gpu = on("H100", "2.9")
    # Pointers to three matrices of each of four groups, three sizes and three strides of 8 bytes.
    arguments = 4 * 3 * 8 + 4 * 3 * 4 + 4 * 3 * 8
    events = gpu.of(product)
    assert arguments in events
    assert -arguments in events
    assert max(events) < WORKSPACE
    assert max(gpu.of(lambda: product(torch.float16))) > WORKSPACE


def test_gradients_are_grouped_products_too(on: Any) -> None:
    on("A100-40GB", "2.9")
    tokens = torch.rand(64, 32, device="cuda", requires_grad=True)
    experts = torch.rand(4, 32, 64, device="cuda", requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
    assert grouped is not None
    grouped(tokens, experts, offs=ends).square().sum().backward()
    assert tokens.grad is not None
    assert experts.grad is not None
    assert (tokens.grad.shape, experts.grad.shape) == (tokens.shape, experts.shape)


def _grouped(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    assert grouped is not None
    result: Tensor = grouped(a, b, **options)
    return result


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("experts", "sentence"),
    [
        (lambda: _zeros(1, 4, 8), "contraction dimension of mat_a and mat_b must match"),
        (lambda: _zeros(1, 8, 8, dtype=torch.float16), "expects tensors of the same dtype"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(experts: Callable[[], Tensor], sentence: str) -> None:
    with simulate("A100-40GB", torch_version="2.13"), pytest.raises(RuntimeError, match=sentence):
        _grouped(_zeros(8, 8), experts(), offs=_zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("model", ["A100-40GB", "B200"])
def test_in_2_8_grouped_products_need_hopper(model: str) -> None:
    with (
        simulate(model, torch_version="2.8"),
        pytest.raises(
            RuntimeError, match=r"only supported on CUDA devices with compute capability = 9"
        ),
    ):
        product()


def test_scaled_products_need_ada_or_hopper() -> None:
    def scaled() -> Tensor:
        a = torch.zeros(32, 32, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)

    with simulate("L4"):
        assert scaled().dtype is torch.bfloat16
    with (
        simulate("A100-40GB"),
        pytest.raises((ValueError, RuntimeError), match=r"or 8\.9, or"),
    ):
        scaled()


def _allocated(gpu: Any, multiply: Callable[[], Tensor]) -> list[int]:
    return [nbytes for nbytes in gpu.of(multiply) if nbytes > 0][-2:]


@pytest.mark.parametrize(
    ("rows", "columns", "by_sm"), [(512, 136, 5888), (512, 128, 5376), (256, 136, 5376)]
)
def test_workspace_of_blackwell_follows_the_size_of_a_group(
    on: Any, rows: int, columns: int, by_sm: int
) -> None:
    """Bytes of the dry device, torch 2.15.0+cu132."""
    gpu = on("B200", "2.15")
    a = torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.zeros(2, 64, columns, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([rows // 2, rows], device="cuda", dtype=torch.int32)
    assert grouped is not None
    assert _allocated(gpu, lambda: grouped(a, b, offs=ends)) == [120, 148 * by_sm]


@pytest.mark.parametrize(
    ("groups", "by_rows", "by_blocks"),
    [(1, 116, 208), (2, 152, 256), (3, 268, 432), (5, 420, 672), (8, 608, 928)],
)
def test_scaled_groups_have_more_arguments(
    on: Any, groups: int, by_rows: int, by_blocks: int
) -> None:
    """Bytes of the dry device, torch 2.15.0+cu132."""
    multiply = getattr(torch.nn.functional, "scaled_grouped_mm", None)
    if multiply is None:
        pytest.skip("came with torch 2.10")
    kinds = torch.nn.functional.ScalingType
    swizzled = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    gpu = on("H100", "2.15")
    a = torch.zeros(64 * groups, 64, device="cuda").to(torch.float8_e4m3fn)
    b = torch.zeros(groups, 64, 64, device="cuda").to(torch.float8_e4m3fn).mT
    ends = torch.arange(64, 64 * groups + 1, 64, device="cuda", dtype=torch.int32)
    rows = torch.ones(64 * groups, device="cuda"), torch.ones(groups, 64, device="cuda")
    options = {"offs": ends, "output_dtype": torch.bfloat16}

    def scaled() -> Tensor:
        return multiply(a, b, rows[0], kinds.RowWise, rows[1], kinds.RowWise, **options)  # type: ignore[no-any-return]  # unknown to 2.9

    assert _allocated(gpu, scaled) == [by_rows, 132 * 512]
    blocks = [torch.ones(2**12, device="cuda").to(torch.float8_e8m0fnu) for _ in range(2)]
    of_blocks = {"swizzle_a": swizzled, "swizzle_b": swizzled, **options}

    def by_block() -> Tensor:
        kind = kinds.BlockWise1x32
        return multiply(a, b, blocks[0], kind, blocks[1], kind, **of_blocks)  # type: ignore[no-any-return]  # unknown to 2.9

    assert _allocated(gpu, by_block) == [by_blocks, 132 * 8704]
