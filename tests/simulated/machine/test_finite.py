"""Searches for infinities and NaN in unknown values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine import notes
from pytest_gpumem.values.errors import UnknownValueError

HERE = re.escape(Path(__file__).name)
NOTE = (
    rf".*{HERE}:\d+ looks for infinities or NaN in numbers that are not computed: they were "
    r"taken for finite"
)

SEARCHES: list[tuple[Callable[[Tensor], Any], bool]] = [
    (lambda x: torch.isnan(x).any() or torch.isinf(x).any(), False),
    (lambda x: torch.isfinite(x).all(), True),
    (lambda x: x.isnan().any().item(), False),
    (lambda x: not torch.isfinite(x.mean()), False),
    (lambda x: torch.isposinf(x).any() | torch.isneginf(x).any(), False),
    (lambda x: (x != x).any(), False),
    (lambda x: (~torch.isfinite(x)).any(), False),
    (lambda x: x.isnan().logical_or(x.isinf()).any(), False),
    (lambda x: torch.isnan(x).sum() == 0, True),
    (lambda x: torch.count_nonzero(torch.isnan(x)).item() == 0, True),
    (lambda x: torch.isfinite(x).all(dim=1).all(), True),
    (lambda x: torch.isfinite(x).float().mean() == 1, True),
    (lambda x: torch.isnan(x)[:, 3:5].T.any(), False),
    (lambda x: torch.isnan(x).logical_not_().all(), True),
    (lambda x: (torch.isnan(x) & (x > 0)).any(), False),
    (lambda x: (x.abs() < math.inf).all(), True),
    (lambda x: (x == torch.tensor(-math.inf, device="cuda")).any(), False),
    (lambda x: torch.isinf(x.to(torch.complex64)).any(), False),
    (lambda x: torch.stack([row.isfinite().all() for row in x[:5]]).all(), True),
    (lambda x: torch.isnan(x).cpu().any(), False),
    (lambda x: x.cpu().isfinite().all(), True),
    (lambda x: torch.isnan(x).nonzero().shape[0] > 0, False),
    (lambda x: x[torch.isfinite(x)].shape == (x.numel(),), True),
    (lambda x: x.masked_select(torch.isnan(x)).numel() > 0, False),
    (lambda x: torch.isnan(x.masked_fill(x > 0.9, -math.inf).softmax(-1)).any(), False),
]


@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize(("search", "expected"), SEARCHES)
def test_unknown_values_are_assumed_finite(
    search: Callable[[Tensor], Any], expected: bool, rows: int
) -> None:
    with simulate("T4") as gpu:
        x = torch.rand(rows, 3000, device="cuda")
        assert bool(search(x)) is expected
        assert gpu.notes
        assert all(re.fullmatch(NOTE, note) for note in gpu.notes)


@pytest.mark.parametrize(("search", "expected"), SEARCHES)
def test_a_search_allocates_as_with_real_values(
    search: Callable[[Tensor], Any], expected: bool
) -> None:
    def events(real_values: bool) -> list[Any]:
        with simulate("T4", real_values=real_values) as gpu:
            assert bool(search(torch.rand(30, 3000, device="cuda"))) is expected
            return [(event.action, event.size, event.addr) for event in gpu.trace]

    assert events(True) == events(False)


@pytest.mark.parametrize(
    "search",
    [
        lambda x: torch.isinf(x.masked_fill(x > 0, -math.inf)).any(),
        lambda x: torch.isnan(x * math.nan).any(),
        lambda x: (torch.full_like(x, math.inf) + x).isfinite().all(),
        lambda x: torch.isnan(x.index_fill_(0, torch.tensor([0], device="cuda"), math.nan)).any(),
        lambda x: x.__setitem__(0, math.nan) or x.clone().isnan().any(),
        lambda x: torch.isinf(torch.where(x > 0, x, -math.inf).cpu()).any(),
        lambda x: (x + torch.tensor([0.0] * 2999 + [math.inf]).cuda()).isinf().any(),
        lambda x: torch.isnan(x).any() & (x > 0).any() | (x > 1).any(),
    ],
)
def test_values_that_the_program_makes_infinite_are_unknown(
    search: Callable[[Tensor], Any],
) -> None:
    with simulate("T4"):
        x = torch.rand(300, 3000, device="cuda")
        with pytest.raises(UnknownValueError, match=rf"bool\(\) at .*{HERE}:\d+"):
            bool(search(x))


def test_a_search_whose_result_is_not_read_leaves_no_note() -> None:
    with simulate("T4") as gpu:
        x = torch.rand(300, 3000, device="cuda")
        torch.where(torch.isnan(x), 0.0, x)
        scores = x.masked_fill(x > 0, -math.inf)[None, None]
        nn.functional.scaled_dot_product_attention(scores, scores, scores)
        assert gpu.notes == ()


def test_gradients_of_masked_attention_are_finite() -> None:
    # A boolean mask becomes one of minus infinities, an argument of the kernel's backward too.
    with simulate("T4"):
        x = torch.rand(2, 8, 64, 64, device="cuda", requires_grad=True)
        hidden = torch.rand(64, 64, device="cuda") > 0.5
        attended = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden)
        (gradient,) = torch.autograd.grad(attended.sum(), x)
        assert torch.isfinite(gradient).all()


def test_a_running_maximum_may_begin_at_minus_infinity() -> None:
    # An online softmax does so, with its sums.
    with simulate("T4"):
        scores = torch.rand(2, 3000, 300, device="cuda").unbind()
        highest = torch.full((3000,), -math.inf, device="cuda")
        total = torch.zeros(3000, device="cuda")
        for part in scores:
            masked = part.masked_fill(part > 0.9, -math.inf)
            higher = torch.maximum(highest, masked.amax(-1))
            total.mul_((highest - higher).exp()).add_((masked - higher[:, None]).exp().sum(-1))
            highest.copy_(higher)
        assert torch.isfinite(highest + total.log()).all()


def test_a_comparison_with_an_infinity_is_an_ordinary_condition() -> None:
    with simulate("T4"):
        x = torch.rand(3000, 300, device="cuda")
        hidden = x.masked_fill(x > 0.9, -math.inf) > 0
        assert x.masked_fill(hidden, 0.0).isfinite().all()


def test_a_loop_that_waits_for_an_infinity_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes.MOST_READS == 10_000
    monkeypatch.setattr(notes, "MOST_READS", 1000)
    with simulate("T4"):
        x = torch.rand((), device="cuda")
        with pytest.raises(UnknownValueError, match=rf"{HERE}:\d+ .* 1,000 times"):
            while torch.isfinite(x):
                pass


def test_a_mask_that_is_overwritten_becomes_unknown() -> None:
    with simulate("T4"):
        x = torch.rand(300, 3000, device="cuda")
        mask = torch.isnan(x)
        mask[0] = x[0] > 0
        with pytest.raises(UnknownValueError):
            bool(mask.any())


def test_real_values_are_searched() -> None:
    with simulate("T4", real_values=True) as gpu:
        x = torch.rand(300, 3000, device="cuda")
        x[7, 7] = math.nan
        assert torch.isnan(x).any()
        assert not torch.isfinite(x).all()
        assert gpu.notes == ()


def test_sparse_tensors_of_the_host_are_added() -> None:
    with simulate("A100-40GB"):
        assert torch.full((2,), math.inf, device="cuda").shape == (2,)
        weight = torch.ones(1)
        weight.add_(torch.tensor([3.0]).to_sparse(), alpha=-1)
        assert weight.item() == -2
