"""Operators of ``torch.library.custom_op`` whose own code runs: shapes alone do not suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

KIB = 1024
Define = Callable[..., Any]


@pytest.fixture
def define() -> Iterator[Define]:
    """Return ``custom_op`` with a fake implementation, for one test."""
    made: list[Any] = []

    def define(function: Callable[..., Any], shapes: Callable[..., Any], **options: Any) -> Any:
        name = f"gpumem_custom::{function.__name__}"
        made.append(torch.library.custom_op(name, function, mutates_args=(), **options))
        made[-1].register_fake(shapes)
        return made[-1]

    yield define
    for operator in made:
        operator._lib._destroy()


def mask(size: int, device: torch.device) -> Tensor:
    twice = torch.ones(2 * size, dtype=torch.bool, device=device)
    return twice[:size].clone()


def mask_alone(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


@pytest.mark.parametrize("device_types", [None, ("cpu", "cuda")])
def test_an_operator_without_tensors_runs_on_its_device_argument(
    define: Define, device_types: Any
) -> None:
    operator = define(mask, mask_alone, device_types=device_types)
    with simulate("A100-40GB", real_values=True) as gpu:
        made = operator(KIB, torch.device("cuda"))
        assert made.is_cuda
        assert gpu.allocated == KIB
        assert gpu.peak_allocated == 3 * KIB  # the operator's code allocates twice as much first
        assert made.all()
        assert operator(KIB, device=torch.device("cpu")).device.type == "cpu"
        assert gpu.allocated == KIB


def count(x: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), device=device) + x.shape[0]


def count_alone(x: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


@pytest.mark.parametrize("place", ["cuda", "cpu", "meta"])
def test_a_device_argument_decides_over_the_tensors_device(define: Define, place: str) -> None:
    operator = define(count, count_alone)
    with simulate("A100-40GB") as gpu:
        x = torch.ones(8, device=place)
        before = gpu.allocated
        made = operator(x, torch.device("cuda"))
        assert made.is_cuda
        assert gpu.allocated - before == 512


def test_an_operator_with_a_device_argument_computes_values(define: Define) -> None:
    operator = define(count, count_alone)
    with simulate("A100-40GB", real_values=True):
        assert operator(torch.ones(8, device="cuda"), torch.device("cuda")).item() == 8


def half(x: Tensor) -> int:
    return x.shape[0] // 2


def positive(x: Tensor) -> int:
    return int((x > 0).sum())


def some(x: Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size(min=0, max=x.shape[0])


def test_an_int_result_comes_from_the_operators_code(define: Define) -> None:
    operator = define(half, some)
    with simulate("A100-40GB"):
        assert operator(torch.ones(8, device="cuda")) == 4


def test_an_int_result_that_depends_on_values_is_unknown(define: Define) -> None:
    operator = define(positive, some)
    with simulate("A100-40GB"), pytest.raises(UnknownValueError):
        operator(torch.rand(8, device="cuda"))
    with simulate("A100-40GB", real_values=True):
        assert operator(torch.ones(8, device="cuda")) == 8


def test_shape_only_implementation_is_given_defaults_as_a_kernel_is() -> None:
    """Torch's own of ``semi_structured::cusparselt_mm`` has none for its last argument."""

    @torch.library.custom_op("gpumem_tests::padded", mutates_args=())
    def padded(x: torch.Tensor, n: int, wide: bool = False) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, n if wide else 1))

    @padded.register_fake
    def _(x: torch.Tensor, n: int, wide: bool) -> torch.Tensor:
        return x.new_empty(x.shape[0], x.shape[1] + (n if wide else 1))

    with simulate("A100-40GB"):
        x = torch.zeros(3, 4, device="cuda")
        assert padded(x, 2).shape == padded(x, 2, wide=False).shape == (3, 5)
        assert padded(x, 2, True).shape == (3, 6)
