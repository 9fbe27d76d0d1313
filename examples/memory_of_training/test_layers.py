"""The memory of a forward and a backward pass, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.memory_of_training import closed_form
from examples.memory_of_training.closed_form import in_blocks
from examples.memory_of_training.experiments import (
    Read,
    deep_backward,
    deep_forward,
    kept_for_backward,
    layer_norm_by_hand,
    linear_layer,
    saved_for_backward,
)

MODEL = 257_024
"""Bytes of Linear(256, 250): a weight of 256,000 and a bias of 1,000, each in whole blocks."""
WORKSPACE = 8_519_680
"""Bytes that cuBLAS keeps for each thread that multiplies, on the recorded GPU."""

on_any_gpu = pytest.mark.gpumem(max_leak=0, baseline=False)


def test_linear_forward(recorded_gpu: None) -> None:
    assert linear_layer(backward=False) == {
        "start": 0,
        "model": MODEL,
        "input": 258_048,
        "forward": 8_778_752,  # 259,072 of tensors
        "deleted": WORKSPACE,
        "workspaces cleared": 0,
    }


@on_any_gpu
def test_forward_tensors(tensors_alone: Read) -> None:
    assert linear_layer(backward=False, read=tensors_alone) == {
        "start": 0,
        "model": MODEL,
        "input": 258_048,
        "forward": 259_072,
        "deleted": 0,
        "workspaces cleared": 0,
    }


def test_linear_backward(recorded_gpu: None) -> None:
    assert linear_layer(backward=True) == {
        "start": 0,
        "model": MODEL,
        "input": 258_048,
        "forward": 8_778_752,
        "backward": 17_555_456,  # gradients as large as the model, and a second workspace
        "deleted": 2 * WORKSPACE,
        "workspaces cleared": 0,
    }


@on_any_gpu
def test_backward_tensors(tensors_alone: Read) -> None:
    seen = linear_layer(backward=True, read=tensors_alone)
    assert seen["forward"] == 259_072
    assert seen["backward"] == 259_072 + MODEL
    assert seen["deleted"] == 0


@on_any_gpu
@pytest.mark.parametrize(
    ("compute", "w_shapes", "saved", "kept"),
    closed_form.INTERMEDIATES.values(),
    ids=closed_form.INTERMEDIATES,
)
def test_kept(
    compute: Callable[..., Tensor],
    w_shapes: list[tuple[int, int]],
    saved: list[tuple[int, ...]],
    kept: int,
) -> None:
    x = torch.randn(100, 256, device="cuda")
    weights = [torch.randn(shape, device="cuda", requires_grad=True) for shape in w_shapes]
    assert saved_for_backward(compute, x, *weights) == saved
    assert kept_for_backward(compute, x, *weights) == kept


@on_any_gpu
def test_layer_norm_by_hand(tensors_alone: Read) -> None:
    x = w = y = intermediate = 512
    assert layer_norm_by_hand(tensors_alone) == x + w + y + intermediate


X = Y = in_blocks(5, 200)
HIDDEN = in_blocks(5, 100)


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_training_keeps_the_input_of_every_linear_layer(recorded_gpu: None, blocks: int) -> None:
    inputs = blocks * (X + HIDDEN)
    expected = closed_form.deep_network(blocks) + inputs + Y + WORKSPACE
    assert deep_forward(blocks, inference=False) == expected


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_inference_keeps_no_input_but_its_own(recorded_gpu: None, blocks: int) -> None:
    expected = closed_form.deep_network(blocks) + X + Y + WORKSPACE
    assert deep_forward(blocks, inference=True) == expected


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_backward_trades_intermediates_for_gradients(recorded_gpu: None, blocks: int) -> None:
    weights = gradients = closed_form.deep_network(blocks)
    assert deep_backward(blocks) == weights + gradients + X + Y + 2 * WORKSPACE


def test_one_block_of_the_deep_network_in_bytes(recorded_gpu: None) -> None:
    assert closed_form.deep_network(1) == 162_304
    assert deep_forward(1, inference=False) == 8_692_224


@on_any_gpu
@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_deep_network_tensors(tensors_alone: Read, blocks: int) -> None:
    model = closed_form.deep_network(blocks)
    training = deep_forward(blocks, inference=False, read=tensors_alone)
    inference = deep_forward(blocks, inference=True, read=tensors_alone)
    assert inference == model + X + Y
    assert training - inference == blocks * HIDDEN + (blocks - 1) * X
    assert deep_backward(blocks, tensors_alone) == inference + model
