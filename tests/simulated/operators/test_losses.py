"""Losses save and allocate the tensors of their native functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

MATRIX = 64 * 64 * 4


def test_mean_squared_error_keeps_a_result_of_the_inputs_size(on: Any) -> None:
    # Da1sypetals/tomi: 64 predictions, a loss of 256 bytes.
    gpu = on()
    predicted, target = torch.randn(64, 1, device="cuda"), torch.randn(64, 1, device="cuda")
    assert gpu.of(lambda: functional.mse_loss(predicted, target)) == [256, 256, -256]
    assert gpu.of(lambda: functional.mse_loss(predicted, target, reduction="none")) == [256]


def test_logsumexp_subtracts_the_maximum(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 64, device="cuda")
    row = 64 * 4
    assert gpu.of(lambda: torch.logsumexp(x, 1)) == [
        row, row, 64, -64, -row, MATRIX, row, -MATRIX, -row,
    ]  # fmt: skip
    out = torch.empty(64, device="cuda")
    assert gpu.of(lambda: torch.logsumexp(x, 1, out=out)) == [
        row, row, 64, -64, -row, MATRIX, -MATRIX, -row,
    ]  # fmt: skip


def test_cross_entropy_with_logits_holds_two_matrices(on: Any) -> None:
    gpu = on()
    x, target = torch.randn(64, 64, device="cuda"), torch.rand(64, 64, device="cuda")
    events = gpu.of(lambda: functional.binary_cross_entropy_with_logits(x, target))
    assert events == [MATRIX, MATRIX, 4, -MATRIX, -MATRIX]


@pytest.mark.parametrize(
    ("loss", "events"),
    [
        (functional.mse_loss, [MATRIX, MATRIX, -MATRIX]),
        (functional.smooth_l1_loss, [MATRIX, MATRIX, -MATRIX]),
        (functional.huber_loss, [MATRIX, 4, -MATRIX]),
        (functional.soft_margin_loss, [MATRIX, 4, -4]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_reduced_loss_may_have_a_temporary(on: Any, loss: Any, events: list[int]) -> None:
    gpu = on()
    predicted, target = (torch.randn(64, 64, device="cuda") for _ in range(2))
    assert gpu.of(lambda: loss(predicted, target)) == events
    assert gpu.of(lambda: loss(predicted, target, reduction="none")) == [MATRIX]


def test_binary_cross_entropy_saves_its_values(on: Any) -> None:
    gpu = on()
    predicted, target = (torch.rand(64, 64, device="cuda") for _ in range(2))
    assert gpu.of(lambda: functional.binary_cross_entropy(predicted, target)) == [MATRIX, 4, -4]


def test_nll_loss_of_images_allocates_total_weight_first(on: Any) -> None:
    gpu = on()
    scores = torch.randn(4, 10, 16, 16, device="cuda")
    classes = torch.zeros(4, 16, 16, dtype=torch.long, device="cuda")
    each = gpu.of(lambda: functional.nll_loss(scores, classes, reduction="none"))
    assert each == [4, 4 * 16 * 16 * 4, -4]


def test_backward_of_soft_margin_loss_allocates_exponentials(on: Any) -> None:
    gpu = on()
    predicted, target = (torch.randn(64, 64, device="cuda") for _ in range(2))
    predicted.requires_grad_()
    loss = functional.soft_margin_loss(predicted, target)
    gradient = torch.ones_like(loss)
    assert gpu.of(lambda: torch.autograd.grad(loss, predicted, gradient)) == [
        MATRIX, MATRIX, MATRIX,  # minus the target, times the prediction, their exponential
        -MATRIX, -MATRIX,
        MATRIX, -MATRIX,
    ]  # fmt: skip


def test_the_gradient_of_targets_leaves_the_input_as_it_is(on: Any) -> None:
    # binary_cross_entropy_with_logits_target_backward: the input times the negative gradient.
    gpu = on()
    x, target = torch.randn(64, 64, device="cuda"), torch.rand(64, 64, device="cuda")
    target.requires_grad_()
    loss = functional.binary_cross_entropy_with_logits(x, target, reduction="none")
    gradient = torch.ones_like(loss)
    matrix = 64 * 64 * 4
    assert gpu.of(lambda: loss.backward(gradient)) == [matrix, matrix, -matrix]


def test_the_gradient_of_logits_is_multiplied_in_place(on: Any) -> None:
    gpu = on()
    x, target = torch.randn(64, 64, device="cuda"), torch.rand(64, 64, device="cuda")
    given = x.requires_grad_(), target.requires_grad_()
    loss = functional.binary_cross_entropy_with_logits(*given, reduction="none")
    gradient = torch.ones_like(loss)
    matrix = 64 * 64 * 4
    # The sigmoid, minus the target, times the gradient; then as above.
    taken = [matrix, matrix, matrix, -matrix]
    assert gpu.of(lambda: loss.backward(gradient)) == taken


@pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")
def test_a_loss_of_two_types_has_the_inputs(on: Any) -> None:
    # As on the dry device with torch 2.15.
    gpu = on()
    predicted = torch.rand(64, 64, device="cuda", requires_grad=True)
    wide = torch.rand(64, 64, device="cuda", dtype=torch.float64)
    assert gpu.of(lambda: functional.huber_loss(predicted, wide))[:3] == [MATRIX, 4, -MATRIX]
    loss = functional.soft_margin_loss(predicted, wide)
    assert loss.dtype is torch.float32
    ones = torch.ones_like(loss)
    assert gpu.of(lambda: torch.autograd.grad(loss, predicted, ones))[:7] == [
        *[2 * MATRIX] * 3, *[-2 * MATRIX] * 2, MATRIX, -2 * MATRIX,
    ]  # fmt: skip
    weighted = functional.binary_cross_entropy(predicted, predicted.detach(), wide)
    assert weighted.dtype is torch.float32


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: functional.binary_cross_entropy(x, y),
        lambda x, y: functional.huber_loss(x, y).backward(),
        lambda x, y: functional.nll_loss(x, torch.zeros(8, dtype=torch.long).cuda(), y[0]),
    ],
)
def test_types_that_a_kernel_does_not_mix_are_refused(on: Any, loss: Any) -> None:
    on()
    x = torch.rand(8, 8, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="expects tensors of the same dtype"):
        loss(x, torch.rand(8, 8, device="cuda", dtype=torch.float64))


@pytest.mark.parametrize(
    ("steps", "batch", "labels"), [(216, 8, 7), (100, 104, 20), (50, 4, 1710), (225, 1, 5)]
)
def test_blanks_of_a_large_ctc_loss_are_summed_apart(
    on: Any, steps: int, batch: int, labels: int
) -> None:
    """From 450 on, of twice the steps and tenths of batch and labels (is_large of LossCTC.cu)."""
    gpu = on()
    targets = 3
    scores = torch.randn(steps, batch, labels, device="cuda", requires_grad=True)
    marks = torch.ones(batch, targets, device="cuda", dtype=torch.long)
    lengths: list[Any] = [(of,) * batch for of in (16, targets)]

    def joined(given: Any) -> bool:
        loss = functional.ctc_loss(given.log_softmax(-1), marks, *lengths)
        events = gpu.of(lambda: loss.backward())
        return given.shape[0] * batch * (targets + 1) * 4 in events

    assert joined(scores)
    assert not joined(scores.detach()[:-8].requires_grad_())
