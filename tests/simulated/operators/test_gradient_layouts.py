"""Layouts of gradients are those of CUDA's kernels on the dry device, not of the formulas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.skipif(
    "allow_override" not in inspect.signature(torch.library.Library.impl).parameters,
    reason="before 2.8 torch's kernels for meta cannot be replaced",
)

ROWS, COLUMNS = (128, 8, 1), (128, 1, 16)
"""Strides of 2 x 16 x 8 numbers: contiguous, and transposed."""


@pytest.mark.parametrize(
    ("call", "strides"),
    [
        (lambda x: nn.LayerNorm(8).cuda()(x), ROWS),
        (lambda x: F.log_softmax(x, -1), ROWS),
        (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none"), ROWS),
        (F.hardswish, COLUMNS),
        (F.elu, COLUMNS),
    ],
)
def test_a_transposed_gradient_of_contiguous_numbers(
    on: Any, call: Callable[[torch.Tensor], torch.Tensor], strides: tuple[int, ...]
) -> None:
    on()
    x = torch.ones(2, 16, 8, device="cuda", requires_grad=True)
    gradient = torch.ones(2, 8, 16, device="cuda").transpose(1, 2)
    (found,) = torch.autograd.grad(call(x), x, gradient)
    assert found.stride() == strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_batch_norm_has_the_inputs_format(on: Any, dtype: torch.dtype) -> None:
    on()
    norm = nn.BatchNorm2d(8).cuda().to(dtype)
    x = torch.ones(2, 8, 4, 4, device="cuda", dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(x).to(memory_format=torch.channels_last)
    (found,) = torch.autograd.grad(norm(x), x, gradient)
    assert found.stride() == (128, 16, 4, 1)


@pytest.mark.parametrize(
    ("call", "strides"),
    [
        (lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"), ROWS),
        (lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"), ROWS),
        (lambda x: F.glu(x, 1), ROWS),
        (F.relu6, ROWS),
        (lambda x: torch.logit(x, 0.1), ROWS),
        (F.leaky_relu, COLUMNS),
        (F.elu, ROWS),
    ],
)
def test_a_contiguous_gradient_of_transposed_numbers(
    on: Any, call: Callable[[torch.Tensor], torch.Tensor], strides: tuple[int, ...]
) -> None:
    on()
    x = torch.ones(2, 8, 16, device="cuda").transpose(1, 2).requires_grad_()
    result = call(x)
    gradient = torch.ones(result.shape, device="cuda")
    (found,) = torch.autograd.grad(result, x, gradient)
    assert found.stride() == strides


def test_some_results_are_contiguous_for_any_input(on: Any) -> None:
    on()
    image = torch.ones(2, 4, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    assert F.pixel_unshuffle(image, 2).stride() == (256, 16, 4, 1)
    assert F.rrelu(image, training=True).stride() == (256, 64, 8, 1)
    assert torch.normal(image, image).stride() == (256, 64, 8, 1)
    with pytest.raises(RuntimeError, match="8"):
        F.pixel_unshuffle(image, 3)


def test_without_training_the_gradient_of_batch_norm_is_contiguous(on: Any) -> None:
    on()
    image = torch.ones(2, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last)
    for trains, strides in ((True, (128, 1, 32, 8)), (False, (128, 16, 4, 1))):
        x = image.clone().requires_grad_()
        ones = [torch.ones(8, device="cuda") for _ in range(4)]
        made = torch.ops.aten.native_batch_norm(x, *ones, trains, 0.1, 1e-5)[0]
        (found,) = torch.autograd.grad(made, x, torch.ones_like(made))
        assert found.stride() == strides


def test_results_given_without_elements_have_the_layout_of_new_ones(on: Any) -> None:
    on()
    x, nothing = torch.ones(16, 8, device="cuda").t(), torch.empty(0, device="cuda")
    assert torch.add(x, x, out=nothing).stride() == torch.add(x, x).stride() == (1, 8)
    assert torch.ops.aten.view_copy(torch.ones(4, 6, 2, device="cuda").mT, [8, 6]).shape == (8, 6)
    assert torch.roll(torch.ones(30, 1, device="cuda").t(), 1, 1).stride() == (30, 1)
