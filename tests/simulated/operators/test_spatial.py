"""Pooling, resizing, padding and CTC: copies of inputs that a kernel cannot read by strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

SIZE = 2 * 8 * 12 * 12 * 4


def _doubled(x: torch.Tensor, mode: str) -> torch.Tensor:
    return functional.interpolate(x, scale_factor=2, mode=mode)


@pytest.mark.parametrize(
    ("call", "outputs"),
    [
        (lambda x: functional.max_pool2d(x, 2), [SIZE // 4, SIZE // 2]),
        (lambda x: functional.avg_pool2d(x, 2), [SIZE // 4]),
        (lambda x: functional.interpolate(x, scale_factor=2), [4 * SIZE]),
        (lambda x: functional.interpolate(x, scale_factor=2, mode="nearest-exact"), [4 * SIZE]),
        (
            lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic", antialias=True),
            [4 * SIZE],
        ),
        (lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), [2 * 8 * 14 * 14 * 4]),
    ],
    ids=["max", "avg", "nearest", "exact", "smooth", "reflect"],
)
def test_strided_inputs_are_copied(
    on: Any, call: Callable[[torch.Tensor], torch.Tensor], outputs: list[int]
) -> None:
    gpu = on()
    x = torch.randn(2, 8, 12, 12, device="cuda", requires_grad=True)
    assert gpu.of(lambda: call(x)) == outputs
    strided = torch.randn(2, 8, 24, 12, device="cuda", requires_grad=True)[:, :, ::2]
    assert gpu.of(lambda: call(strided)) == [*outputs, SIZE, -SIZE]


@pytest.mark.parametrize(
    ("mode", "dims"), [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]
)
def test_linear_resizing_reads_by_strides(on: Any, mode: str, dims: int) -> None:
    gpu = on()
    size = 2 * 4 * 6**dims * 4
    x = torch.zeros(2, 4, *[6] * dims, 2, device="cuda")[..., 0].requires_grad_()
    assert gpu.of(lambda: _doubled(x, mode)) == [size * 2**dims]
    y = _doubled(x, mode)
    gradient = torch.ones((), device="cuda").expand_as(y)
    copy = size * 2**dims
    assert gpu.of(lambda: torch.autograd.grad(y, x, gradient))[:3] == [size, copy, -copy]


@pytest.mark.parametrize(
    ("mode", "channels", "is_kept"),
    [("nearest", 4, True), ("nearest", 2, False), ("bilinear", 16, True)],
)
def test_few_channels_last_are_resized_as_channels_first(
    on: Any, mode: str, channels: int, is_kept: bool
) -> None:
    gpu = on()
    size = 2 * channels * 6 * 6 * 4
    x = torch.zeros(2, channels, 6, 6, device="cuda").to(memory_format=torch.channels_last)
    made = [] if is_kept else [4 * size, size, -size, -4 * size]
    assert gpu.of(lambda: _doubled(x, mode)) == [4 * size, *made]
    wide = torch.zeros(2, 2 * channels, 6, 6, device="cuda").to(memory_format=torch.channels_last)
    copied = [size, -size] if is_kept else made
    assert gpu.of(lambda: _doubled(wide[:, :channels], mode)) == [4 * size, *copied]


def test_bilinear_resizing_reads_few_channels_by_strides(on: Any) -> None:
    gpu = on()
    x = torch.zeros(2, 16, 6, 6, device="cuda").to(memory_format=torch.channels_last)[:, :8]
    resized = 4 * x.nbytes
    assert gpu.of(lambda: _doubled(x, "bilinear")) == [resized]


def test_volumes_are_resized_into_a_contiguous_result(on: Any) -> None:
    gpu = on()
    x = torch.zeros(2, 4, 6, 6, 6, device="cuda").to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    size = x.nbytes
    copies = [8 * size, size, -size, -8 * size]
    for mode in ("nearest", "nearest-exact"):
        assert gpu.of(partial(_doubled, x, mode)) == [8 * size, *copies]
    y = _doubled(x, "trilinear")
    gradient = torch.ones_like(y)
    assert gpu.of(lambda: torch.autograd.grad(y, x, gradient))[:5] == [size, *copies]


def test_channels_last_is_pooled_without_a_copy(on: Any) -> None:
    gpu = on()
    x = torch.randn(2, 8, 12, 12, device="cuda").contiguous(memory_format=torch.channels_last)
    assert gpu.of(lambda: functional.avg_pool2d(x, 2)) == [SIZE // 4]
    assert functional.avg_pool2d(x, 2).is_contiguous(memory_format=torch.channels_last)


def test_ctc_loss_copies_its_lengths_to_the_gpu(on: Any) -> None:
    gpu = on()
    loss = nn.CTCLoss(reduction="sum")
    logits = torch.randn(50, 4, 20, device="cuda", requires_grad=True)
    targets = torch.ones(4, 10, dtype=torch.long, device="cuda")
    lengths = torch.full((4,), 50), torch.full((4,), 10)
    alpha = 4 * 50 * 21 * 4
    events = gpu.of(lambda: loss(logits, targets, *lengths))
    # Three vectors of int64 for the time of the call; log_alpha, the losses and their sum.
    assert events == [32, 32, 32, alpha, 16, -32, -32, -32, 4]
    result = loss(logits, targets, *lengths)
    gradient = torch.ones_like(result)
    backward = gpu.of(lambda: result.backward(gradient))
    assert backward[:8] == [32, 32, 32, alpha, 50 * 4 * 20 * 4, -alpha, -32, -32]


def test_unfold_begins_with_a_block_of_the_images_size(on: Any) -> None:
    gpu = on()
    image = torch.randn(4, 16, 64, 64, device="cuda")
    size, columns = image.nbytes, 9 * image.nbytes
    assert gpu.of(lambda: functional.unfold(image, 3, padding=1)) == [size, columns, -size]
    made = functional.unfold(image, 3, padding=1)
    # The image keeps the memory of its columns.
    assert gpu.of(lambda: functional.fold(made, (64, 64), 3, padding=1)) == [columns]


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), 4),
        (lambda x: functional.interpolate(x, scale_factor=2, mode="nearest-exact"), 4),
        (lambda x: functional.adaptive_max_pool2d(x, 32), 1 / 4),
    ],
)
def test_an_expanded_gradient_is_copied(on: Any, function: Any, factor: float) -> None:
    gpu = on()
    x = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    y = function(x)
    gradient = torch.ones((), device="cuda").expand_as(y)
    copy = int(x.nbytes * factor)
    assert gpu.of(lambda: torch.autograd.grad(y, x, gradient))[:3] == [x.nbytes, copy, -copy]


GRID = 2 * 6 * 5 * 2 * 4
SAMPLED = 2 * 8 * 6 * 5 * 4


@pytest.mark.parametrize("is_strided", [False, True])
def test_grid_sample_with_aligned_corners_runs_cudnn(on: Any, is_strided: bool) -> None:
    """Seen on the dry device, 2.15."""
    gpu = on()
    x = torch.randn(2, 8, 12, 12, device="cuda", requires_grad=True)
    grid = torch.zeros(2, 6, 5, 2, device="cuda")
    if is_strided:
        grid = torch.zeros(2, 2, 6, 5, device="cuda").permute(0, 2, 3, 1)
    copy = [GRID] if is_strided else []
    assert gpu.of(lambda: functional.grid_sample(x, grid, align_corners=True)) == [
        *copy,
        SAMPLED,
        *(-each for each in copy),
    ]
    y = functional.grid_sample(x, grid, align_corners=True)
    repeated = torch.ones((), device="cuda").expand_as(y)
    events = gpu.of(lambda: torch.autograd.grad(y, x, repeated))
    assert events[: len(copy) + 3] == [*copy, SAMPLED, SIZE, GRID]


@pytest.mark.parametrize("arguments", [{"align_corners": False}, {"mode": "nearest"}])
def test_other_grid_samples_run_torchs_kernels(on: Any, arguments: dict[str, Any]) -> None:
    gpu = on()
    x = torch.randn(2, 8, 12, 12, device="cuda", requires_grad=True)
    grid = torch.zeros(2, 6, 5, 2, device="cuda")
    y = functional.grid_sample(x, grid, **{"align_corners": True, **arguments})
    gradient = torch.ones_like(y)
    # The gradient of the grid is not made.
    assert gpu.of(lambda: torch.autograd.grad(y, x, gradient))[:1] == [SIZE]
