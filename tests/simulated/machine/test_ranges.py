"""What random integers can be is known although nobody draws them: a loss may count its labels."""

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
def test_comparisons_with_what_it_cannot_be_are_known(
    question: Callable[[Tensor], Tensor], answer: int
) -> None:
    with simulate("T4") as gpu:
        assert question(torch.randint(10, (LARGE,), device="cuda")).item() == answer
        assert gpu.notes == ()


def test_the_least_may_be_given() -> None:
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
def test_what_is_written_or_computed_may_be_anything(change: Callable[[Tensor], Tensor]) -> None:
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


def test_where_one_of_equal_elements_was_found_is_not_known() -> None:
    with simulate("T4"):
        mask = torch.randint(10, (10, LARGE), device="cuda") >= 0
        found = mask.max(dim=1)
        assert found.values.all().item()
        with pytest.raises(UnknownValueError):
            assert (found.indices == 1).all()


def test_what_it_can_be_is_not_taken_for_granted() -> None:
    with simulate("T4"):
        x = torch.randint(10, (LARGE,), device="cuda")
        with pytest.raises(UnknownValueError):
            (x == 4).any().item()


def test_a_narrower_type_wraps() -> None:
    with simulate("T4"), pytest.raises(UnknownValueError):
        (torch.randint(1000, (LARGE,), device="cuda").to(torch.int8) < 0).any().item()


def test_with_real_values_they_are_counted() -> None:
    with simulate("T4", real_values=True):
        x = torch.randint(10, (LARGE,), device="cuda")
        assert 0 < (x == 4).sum().item() < LARGE
