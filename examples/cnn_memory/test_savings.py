"""Ways to save memory, and their cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from examples.cnn_memory.models import blocks, bytes_of
from pytest_gpumem.simulating import SimulatedRun

SHAPE = (4, 16, 64, 64)
TENSOR = bytes_of(*SHAPE)
BLOCKS = 8


@pytest.mark.gpumem(max_leak=0, baseline=False)
@pytest.mark.parametrize(("inplace", "needed"), [(False, TENSOR), (True, 0)])
def test_relu_in_place_needs_no_tensor_of_its_own(inplace: bool, needed: int) -> None:
    relu, x = nn.ReLU(inplace), torch.ones(SHAPE, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    relu(x)
    assert torch.cuda.max_memory_allocated() - before == needed


@pytest.mark.parametrize("inplace", [False, True])
def test_after_a_convolution_both_keep_the_same_for_backward(
    t4: SimulatedRun, inplace: bool
) -> None:
    # Backward needs ReLU's output, and no operator needs its input.
    model, x = blocks(BLOCKS, inplace=inplace).cuda(), torch.ones(SHAPE, device="cuda")
    before = torch.cuda.memory_allocated()
    y = model(x)
    assert torch.cuda.memory_allocated() - before == BLOCKS * TENSOR
    del y


Forward = Callable[[nn.Sequential, Tensor], Tensor]

FORWARD: dict[str, tuple[Forward, int]] = {
    # The output of each block is the input of the next one, which backward needs.
    "everything kept": (lambda model, x: model(x), BLOCKS),
    # Of three segments of two blocks the output alone, and all of the last one.
    "four segments": (lambda m, x: checkpoint_sequential(m, 4, x, use_reentrant=False), 3 + 2),
    "the whole model": (lambda model, x: checkpoint(model, x, use_reentrant=False), 1),
}


@pytest.mark.parametrize("name", FORWARD)
def test_checkpointing_keeps_less(t4: SimulatedRun, name: str) -> None:
    forward, kept = FORWARD[name]
    model, x = blocks(BLOCKS).cuda(), torch.ones(SHAPE, device="cuda")
    before = torch.cuda.memory_allocated()
    y = forward(model, x)
    assert torch.cuda.memory_allocated() - before == kept * TENSOR
    y.sum().backward()


def flops(forward: Forward) -> int:
    model, x = blocks(BLOCKS).cuda(), torch.ones(SHAPE, device="cuda")
    with FlopCounterMode(display=False) as counter:
        forward(model, x).sum().backward()
    return int(counter.get_total_flops())


def test_checkpointing_computes_more(t4: SimulatedRun) -> None:
    once = 2 * 4 * 16 * 16 * 3 * 3 * 64 * 64 * BLOCKS
    # Backward takes as much for the weights and again for the inputs, but for the first one's.
    backward = 2 * once - once // BLOCKS
    assert flops(FORWARD["everything kept"][0]) == once + backward
    assert flops(FORWARD["four segments"][0]) == once + once * 6 // BLOCKS + backward
    assert flops(FORWARD["the whole model"][0]) == pytest.approx(2 * once + backward, rel=0.01)


@pytest.mark.parametrize(("scale", "part"), [(1, 1), (2, 4), (4, 16)])
def test_smaller_images_take_a_part(t4: SimulatedRun, scale: int, part: int) -> None:
    model = blocks(BLOCKS).cuda()
    before = torch.cuda.memory_allocated()
    y = model(torch.ones(4, 16, 64 // scale, 64 // scale, device="cuda"))
    # The input, and the output of each block.
    assert torch.cuda.memory_allocated() - before == (1 + BLOCKS) * TENSOR // part
    del y
