"""apex's other optimizers and its cross entropy: events are those of its Python over kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.stand_ins.apex import MODULES

SIZES = (1000, 300_000)
"""Of parameters: one chunk of 65,536 elements, and five."""
HALF = [2 * size for size in SIZES]
WIDE = [4 * size for size in SIZES]
FLAG = 4
NORM = [320 * 4, 4, -320 * 4]
"""A norm of all: sums of 320 blocks, and what they come to."""
NORMS = [320 * 4, 2 * 5 * 4, 2 * 4, 4]
"""Of each as well: sums of five chunks of both tensors, and both norms."""


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("A100-40GB")


def stepped(
    gpu: Any, name: str, *dtypes: torch.dtype, **options: Any
) -> tuple[Any, list[int], list[int]]:
    """Return an optimizer, and the events of making it and of its first step."""
    params = [
        torch.nn.Parameter(torch.empty(size, device="cuda", dtype=dtype))
        for size, dtype in zip(SIZES, dtypes * (2 // len(dtypes)), strict=True)
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    gpu.events()
    optimizer = MODULES["apex.optimizers"][name](params, **options)
    made = gpu.events()
    optimizer.step()
    return optimizer, made, gpu.events()


def step_again(gpu: Any, optimizer: Any) -> list[int]:
    gpu.events()
    optimizer.step()
    return gpu.events()  # type: ignore[no-any-return]


def test_sgd_makes_momentums_of_one_type_after_those_of_the_other(gpu: Any) -> None:
    optimizer, made, events = stepped(gpu, "FusedSGD", torch.float32, torch.float16, lr=0.1)
    assert made == [FLAG]
    assert events == [HALF[1], WIDE[0]], "in float16 first"
    assert step_again(gpu, optimizer) == []
    optimizer.zero_grad()
    assert stepped(gpu, "FusedSGD", torch.bfloat16, lr=0.1)[2] == [], "and no other type at all"
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        stepped(gpu, "FusedSGD", torch.float16, lr=-1)
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        stepped(gpu, "FusedSGD", torch.float16, lr=1, nesterov=True)


def test_adagrad_keeps_one_sum(gpu: Any) -> None:
    optimizer, made, events = stepped(gpu, "FusedAdagrad", torch.float16)
    assert made == [FLAG]
    assert events == HALF
    optimizer.zero_grad()
    assert gpu.events() == [-HALF[0], -HALF[1]]
    with pytest.raises(RuntimeError, match="FusedAdagrad only support fp16 and fp32"):
        stepped(gpu, "FusedAdagrad", torch.bfloat16)


def test_lamb_takes_norms_of_gradients_parameters_and_updates(gpu: Any) -> None:
    optimizer, made, events = stepped(gpu, "FusedLAMB", torch.float32)
    assert made == [FLAG]
    first = [
        *(4, 4, *NORM, -4),
        *NORM,
        *(WIDE[0], WIDE[0], WIDE[1], WIDE[1]),
        *(*NORMS, -NORMS[1], -NORMS[0], *NORMS, -NORMS[1], -NORMS[0]),
    ]
    assert events[: len(first)] == first
    assert sum(events) == 2 * sum(WIDE), "moments alone remain"
    assert step_again(gpu, optimizer).count(WIDE[0]) == 0
    with pytest.raises(RuntimeError, match="AMSGrad"):
        stepped(gpu, "FusedLAMB", torch.float32, amsgrad=True)


def test_novograd_begins_with_norms_of_gradients(gpu: Any) -> None:
    optimizer, made, events = stepped(gpu, "FusedNovoGrad", torch.float16)
    assert made == [FLAG]
    copy = WIDE[0]
    assert events[:6] == [*HALF, copy, copy, -copy, 4], "a copy in float32, its squares, their sum"
    kernel = [320 * 4, 2 * 5 * 4, 4, -4, -2 * 5 * 4, -320 * 4]
    assert events[-7:] == [2 * 4, *kernel], "a second moment for each parameter"
    assert step_again(gpu, optimizer) == kernel
    assert stepped(gpu, "FusedNovoGrad", torch.float16, init_zero=True)[2] == [
        *HALF,
        2 * 4,
        *kernel,
    ]
    with pytest.raises(RuntimeError, match="only support l2/inf norm"):
        stepped(gpu, "FusedNovoGrad", torch.float16, norm_type=1)


def test_mixed_precision_lamb_keeps_master_weights(gpu: Any) -> None:
    name, narrow = "FusedMixedPrecisionLamb", torch.bfloat16
    optimizer, made, events = stepped(gpu, name, narrow, reduced_precision_dtype=narrow)
    assert sum(made) == 4 + 4 + FLAG, "rate and step are on the device"
    assert events[:2] == [HALF[0], WIDE[0]], "a clone, and the master weight of it"
    assert sum(events) == 3 * sum(WIDE), "master weights and moments"
    assert sum(step_again(gpu, optimizer)) == 0
    assert sum(stepped(gpu, name, torch.float32)[2]) == 2 * sum(WIDE)


ROWS, CLASSES = 100, 3000
LOGITS = ROWS * CLASSES * 2
LABELS = ROWS


@pytest.mark.parametrize(("half_to_float", "width"), [(False, 2), (True, 4)])
def test_cross_entropy_keeps_sums_of_rows(gpu: Any, half_to_float: bool, width: int) -> None:
    loss = MODULES["apex.contrib.xentropy"]["SoftmaxCrossEntropyLoss"].apply
    logits = torch.empty(ROWS, CLASSES, device="cuda", dtype=torch.float16, requires_grad=True)
    labels = torch.empty(ROWS, device="cuda", dtype=torch.int64)
    gpu.events()
    losses = loss(logits, labels, 0.1, 0, half_to_float)
    assert gpu.events() == [ROWS * width, ROWS * 4, LABELS, -LABELS]
    grad = torch.empty_like(losses)
    assert gpu.of(lambda: torch.autograd.grad(losses, logits, grad)) == [
        *(LABELS, -LABELS, LOGITS, -ROWS * width)
    ]
    with pytest.raises(RuntimeError, match="Label type should be CUDA Long"):
        loss(logits, labels.int(), 0.1, 0, half_to_float)
    with pytest.raises(RuntimeError, match="conversion is supported for Half type only"):
        loss(logits.float(), labels, 0.1, 0, True)
