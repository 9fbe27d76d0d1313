"""Closed forms, by hand and against the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.prediction.closed_forms import (
    activation_bytes,
    attention_bytes,
    autocast_cache_bytes,
    block_bytes,
    buffer_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
)

MODEL = nn.Sequential(nn.Linear(256, 250), nn.BatchNorm1d(250))


def test_blocks_are_multiples_of_512_bytes() -> None:
    assert block_bytes((800,), torch.float32) == 3584
    assert block_bytes((256,), torch.float16) == 512
    assert block_bytes((0, 5), torch.float32) == 0


def test_parameters_gradients_and_buffers_have_closed_forms() -> None:
    # Linear: 256 · 250 · 4 and 1,000 -> 1,024 bytes; batch norm: two of 1,024.
    assert parameter_bytes(MODEL) == 256_000 + 3 * 1024
    assert gradient_bytes(MODEL) == 256_000 + 3 * 1024
    assert parameter_bytes(MODEL, torch.bfloat16) == 128_000 + 3 * 512
    # Running mean and variance, and a counter.
    assert buffer_bytes(MODEL) == 2 * 1024 + 512


def test_frozen_parameters_have_no_gradients() -> None:
    layer = nn.Linear(256, 256)
    layer.weight.requires_grad_(False)
    assert gradient_bytes(layer) == 1024


def test_autocast_keeps_casts_of_weights_and_biases() -> None:
    assert autocast_cache_bytes(MODEL, torch.bfloat16) == 128_000 + 512


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD with momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "NAdam, capturable": lambda p: torch.optim.NAdam(p, capturable=True),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop, centered, momentum": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_equals_the_bytes_that_a_step_keeps(name: str) -> None:
    with simulate("T4"):
        layer = nn.Linear(300, 70, device="cuda")
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = torch.cuda.memory_allocated()
        optimizer = OPTIMIZERS[name](layer.parameters())  # Adagrad makes its state here
        optimizer.step()
        torch._C._cuda_clearCublasWorkspaces()  # Adafactor multiplies matrices
        assert optimizer_state_bytes(optimizer) == torch.cuda.memory_allocated() - before


def test_adam_state_is_twice_the_parameters() -> None:
    layer = nn.Linear(256, 256, bias=False)
    assert optimizer_state_bytes(torch.optim.Adam(layer.parameters())) == 2 * 256 * 256 * 4


def test_an_optimizer_without_a_closed_form_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS has no closed form; there are: SGD, Adam"):
        optimizer_state_bytes(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))


def alexnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(192 * 13 * 13, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 100),
    )


def deep(layers: int) -> nn.Sequential:
    blocks = [
        [nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 200), nn.Sigmoid()] for _ in range(layers)
    ]
    return nn.Sequential(*[layer for block in blocks for layer in block])


CHAINS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "deep": (lambda: deep(4), (5, 200)),
    "AlexNet": (alexnet, (8, 3, 224, 224)),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64)),
        (7, 33, 64),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 9)),
        (40, 64),
    ),
    "softmax": (lambda: nn.Sequential(nn.Linear(64, 1000), nn.Softmax(-1)), (40, 64)),
    "leading activation": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(64, 10)), (40, 64)),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("training", [True, False])
def test_activations_of_a_chain_count_each_tensor_once(name: str, training: bool) -> None:
    make, shape = CHAINS[name]
    with simulate("T4") as gpu:
        chain = make().cuda()
        x = torch.rand(shape, device="cuda")
        before = gpu.allocated
        with torch.set_grad_enabled(training):
            y = chain(x)
        torch._C._cuda_clearCublasWorkspaces()
        kept = gpu.allocated - before
        if not training:
            chain.requires_grad_(False)
        assert activation_bytes(chain, shape) == kept
    del y


def test_an_embedding_keeps_its_output_for_the_next_layer() -> None:
    chain = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 32))
    # 8 · 16 indices: 128 · 64 · 4 bytes from the embedding, 128 · 32 · 4 from the linear layer.
    assert activation_bytes(chain, (8, 16)) == 32_768 + 16_384


def test_a_layer_without_a_closed_form_is_refused() -> None:
    with pytest.raises(ValueError, match="LSTM has no closed form; there are: Linear, Conv1d"):
        activation_bytes(nn.LSTM(4, 4), (1, 1, 4))


@pytest.mark.parametrize(
    ("kind", "dtype", "gpu"),
    [
        ("flash", torch.float16, "A100-40GB"),
        ("efficient", torch.float32, "A100-40GB"),
    ],
)
def test_attention_keeps_the_bytes_of_its_kernel(kind: str, dtype: torch.dtype, gpu: str) -> None:
    with simulate(gpu, torch_version="2.6") as run:
        q, k, v = (
            torch.rand(2, 4, 100, 64, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        before = run.allocated
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        assert run.allocated - before == attention_bytes(2, 4, 100, 100, 64, dtype, kind)
    del y


def test_an_unknown_attention_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic' is not a kernel of attention"):
        attention_bytes(1, 1, 1, 1, 1, torch.float32, "magic")
