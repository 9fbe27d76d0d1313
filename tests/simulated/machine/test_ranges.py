"""Ranges of random integers are known without values: a loss may check its labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

LARGE = 100_000


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: (x != -100).sum(), LARGE),
        (lambda x: (x == -100).sum(), 0),
        (lambda x: (x != 10).all(), True),
        (lambda x: (x >= 0).all(), True),
        (lambda x: (x < 0).any(), False),
        (lambda x: (x < 10).all(), True),
        (lambda x: (x > 9).any(), False),
        (lambda x: (x <= 9.5).all(), True),
        (lambda x: (x.view(10, -1)[2:].clone() != -100).sum(), LARGE - LARGE // 5),
        (lambda x: (x.int() != -100).sum(), LARGE),
        (lambda x: (torch.cat([x, x + 0, x][::2]) != -1).sum(), 2 * LARGE),
    ],
)
def test_comparisons_outside_of_the_range_are_known(
    question: Callable[[Tensor], Tensor], answer: int
) -> None:
    with simulate("T4") as gpu:
        assert question(torch.randint(10, (LARGE,), device="cuda")).item() == answer
        assert gpu.notes == ()


def test_randint_may_have_a_lower_bound() -> None:
    with simulate("T4"):
        x = torch.randint(3, 10, (LARGE,), device="cuda")
        assert (x > 2).all().item()
        with pytest.raises(UnknownValueError):
            (x > 3).all().item()


def put(x: Tensor) -> Tensor:
    x[:3] = -100
    return x


@pytest.mark.parametrize(
    "change",
    [
        put,
        lambda x: x.sub_(5),
        lambda x: x - 5,
        lambda x: x.view(torch.int32),
        lambda x: x.copy_(torch.rand(LARGE, device="cuda")),
        lambda x: x.resize_(LARGE + 1),
        lambda x: torch.cat([x, x - 5]),
        lambda x: x.masked_fill(torch.rand(LARGE, device="cuda") < 0.5, -3),
    ],
)
def test_a_computed_or_overwritten_tensor_has_no_range(change: Callable[[Tensor], Tensor]) -> None:
    with simulate("T4"):
        x = change(torch.randint(10, (LARGE,), device="cuda"))
        with pytest.raises(UnknownValueError):
            (x < 0).any().item()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_put_((torch.tensor([0], device="cuda"),), torch.tensor(False).cuda()),
        lambda x: x.scatter_(0, torch.tensor([0], device="cuda"), False),
        lambda x: x.logical_and_(torch.rand(LARGE, device="cuda") < 0.5),
        lambda x: x.masked_fill_(torch.rand(LARGE, device="cuda") < 0.5, False),
    ],
)
def test_the_result_of_a_comparison_is_known_until_it_is_written_to(
    write: Callable[[Tensor], Tensor],
) -> None:
    with simulate("T4"):
        mask = torch.randint(10, (LARGE,), device="cuda") >= 0
        assert mask.all()
        write(mask)
        with pytest.raises(UnknownValueError):
            mask.all().item()


def test_the_index_of_one_of_equal_elements_is_unknown() -> None:
    with simulate("T4"):
        mask = torch.randint(10, (10, LARGE), device="cuda") >= 0
        found = mask.max(dim=1)
        assert found.values.all().item()
        with pytest.raises(UnknownValueError):
            assert (found.indices == 1).all()


def test_comparisons_inside_of_the_range_are_unknown() -> None:
    with simulate("T4"):
        x = torch.randint(10, (LARGE,), device="cuda")
        with pytest.raises(UnknownValueError):
            (x == 4).any().item()


def test_a_conversion_to_a_narrower_dtype_wraps() -> None:
    with simulate("T4"), pytest.raises(UnknownValueError):
        (torch.randint(1000, (LARGE,), device="cuda").to(torch.int8) < 0).any().item()


def test_real_values_of_random_integers_are_compared() -> None:
    with simulate("T4", real_values=True):
        x = torch.randint(10, (LARGE,), device="cuda")
        assert 0 < (x == 4).sum().item() < LARGE
