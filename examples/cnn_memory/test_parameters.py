"""Memory that depends on the input, and memory that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from examples.cnn_memory.models import alexnet, blocks, bytes_of, size_of
from pytest_gpumem import fit_batch
from pytest_gpumem.prediction.closed_forms import (
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
)
from pytest_gpumem.simulating import SimulatedRun

MB = 1000**2


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("layer", "parameters"),
    [
        (nn.Linear(100, 50, bias=False), 100 * 50),
        (nn.Conv2d(16, 32, 3, bias=False), 16 * 32 * 3 * 3),
        (nn.BatchNorm2d(64), 2 * 64),
        (nn.Embedding(1000, 300), 1000 * 300),
        (nn.ReLU(), 0),
        (nn.MaxPool2d(2), 0),
        (nn.Dropout(), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_parameters_by_layer(layer: nn.Module, parameters: int) -> None:
    assert count(layer) == parameters


TIMES: dict[str, tuple[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 2),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3),
    "Adam": (lambda p: torch.optim.Adam(p), 4),
}


@pytest.mark.gpumem(max_leak=0, baseline=False)
@pytest.mark.parametrize("name", TIMES)
def test_training_holds_the_parameters_several_times(name: str) -> None:
    make, times = TIMES[name]
    model = blocks(4).cuda()
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    parameters = parameter_bytes(model)
    by_formula = parameters + gradient_bytes(model) + optimizer_state_bytes(optimizer)
    assert by_formula == times * parameters == torch.cuda.memory_allocated()
    assert parameters == 4 * bytes_of(16, 16, 3, 3)


def test_memory_is_the_model_and_so_much_for_each_sample(t4: SimulatedRun) -> None:
    model = blocks(4).cuda()

    def step(batch: int) -> None:
        model(torch.ones(batch, 16, 64, 64, device="cuda")).sum().backward()

    fit = fit_batch(step, [8, 16, 32])

    # The input, the output of each block, and two gradients while backward passes a layer. The
    # workspaces of cuDNN's convolutions are small here; they are why it is not exact.
    sample = bytes_of(16, 64, 64)
    assert fit.bytes_per_sample == pytest.approx(6 * sample, rel=0.01)
    assert parameter_bytes(model) < fit.model_bytes < parameter_bytes(model) + MB
    assert fit.residual < sample

    # The largest batch is no estimate: it ran, and the next one ran out of memory.
    assert fit.largest is not None
    assert fit.largest == pytest.approx(fit.total_memory / fit.bytes_per_sample, rel=0.01)


def test_sizes_of_a_model() -> None:
    size = size_of(alexnet(), 1, 3, 224, 224)
    assert size.parameters == 61_100_840 * 4
    assert size.outputs == 4_339_616
    assert size.outputs_and_gradients == 2 * size.outputs
    # With one image, parameters take most; with 128, activations.
    assert size.parameters > 28 * size.outputs_and_gradients
    assert size_of(alexnet(), 128, 3, 224, 224).outputs == 128 * size.outputs


def test_the_real_number_exceeds_the_sum(t4: SimulatedRun) -> None:
    model, x = nn.Linear(300, 300).cuda(), torch.ones(10, 300, device="cuda")
    y = model(x)

    sizes = [t.nbytes for t in (*model.parameters(), x, y)]
    assert sum(sizes) == 385_200
    # Every tensor in whole blocks of 512 bytes, and cuBLAS's workspace ...
    in_blocks = [-(-size // 512) * 512 for size in sizes]
    assert sum(in_blocks) == 386_560
    assert torch.cuda.memory_allocated() == 386_560 + 8_519_680
    # ... in segments of 2 MiB for small blocks, and of 20 MiB for blocks above 1 MiB.
    assert torch.cuda.memory_reserved() == (2 + 20) * 1024**2
    # nvidia-smi shows the CUDA context on top, a few hundred megabytes before the first tensor.
