"""Optimizer steps: state and temporaries, worked out from the tensors they make.

Three ``Linear(1000, 1000)``: W, a weight, is 4,000,000 bytes in blocks of 512, and B a bias of
4,000; P is all of them. Segments are expandable, so that every block has exactly its rounded size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

from pytest_gpumem import simulate

BLOCK = 512
"""A scalar on the device: a step counter, a learning rate."""
W = 4_000_256
B = 4_096
MASK = 1_000_448
"""One byte per element of a weight."""
P = 3 * (W + B)
P_OF_HALVES = 3 * (2_000_384 + 2_048)

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def of(name: str, **settings: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **settings)


def model(layers: int = 3, width: int = 1000) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()


@pytest.fixture
def gpu() -> Iterator[Any]:
    with simulate("A100-80GB", alloc_conf="expandable_segments:True") as run:
        yield run


def parameters_with_gradients() -> list[torch.Tensor]:
    parameters = list(model().parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return list(parameters)


def charged(gpu: Any, make: Make, parameters: list[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes of state, and the peak above all kept bytes in the second step."""
    before = gpu.allocated
    optimizer = make(parameters)
    optimizer.step()
    kept = gpu.allocated - before
    with gpu.phase("step"):
        optimizer.step()
    assert gpu.allocated - before == kept
    return kept, gpu.phases["step"].peak_allocated - before - kept


LISTS = {
    # Names as in torch/optim/*.py, _multi_tensor_*: lists as long as the list of parameters.
    "SGD": (of("SGD", lr=0.1), 0, 0),
    "SGD weight_decay": (of("SGD", lr=0.1, weight_decay=0.1), 0, P),  # grads + params
    "SGD maximize": (of("SGD", lr=0.1, maximize=True), 0, P),  # -grads
    "SGD momentum": (of("SGD", lr=0.1, momentum=0.9), P, 0),
    "SGD nesterov": (of("SGD", lr=0.1, momentum=0.9, nesterov=True), P, 0),
    "Adam": (of("Adam"), 2 * P, P),  # exp_avg_sq_sqrt
    "Adam weight_decay": (of("Adam", weight_decay=0.1), 2 * P, P),  # gone before the sqrt
    "Adam maximize": (of("Adam", maximize=True), 2 * P, P),
    "Adam amsgrad": (of("Adam", amsgrad=True), 3 * P, P),
    "AdamW": (of("AdamW"), 2 * P, P),
    "AdamW amsgrad": (of("AdamW", amsgrad=True), 3 * P, P),
    # exp_avg_sq_sqrt beside two corrections, the second of them for a moment twice.
    "AdamW capturable": (of("AdamW", capturable=True), 2 * P + 6 * BLOCK, P + 12 * BLOCK),
    "Adadelta": (of("Adadelta"), 2 * P, 2 * P),  # std, deltas
    "Adagrad": (of("Adagrad"), P, 2 * P),  # std, numerator
    "Adamax": (of("Adamax"), 2 * P, P),  # abs of the gradients
    "NAdam": (of("NAdam"), 2 * P, P),  # exp_avg_sq_sqrt
    "NAdam weight_decay": (of("NAdam", weight_decay=0.1), 2 * P, 2 * P),
    "RAdam": (of("RAdam"), 2 * P, P),  # buffer
    "RMSprop": (of("RMSprop"), P, P),  # avg
    "RMSprop momentum": (of("RMSprop", momentum=0.9), 2 * P, P),
    "RMSprop centered": (of("RMSprop", centered=True), 2 * P, P),
    "RMSprop weight_decay": (of("RMSprop", weight_decay=0.1), P, 2 * P),
    # signs; for one of them a mask, the scalar of where() on the device and what it made of them.
    "Rprop": (of("Rprop"), 2 * P, P + W + MASK + BLOCK),
    # intermediate; step, eta and mu of each parameter are on the device.
    "ASGD": (of("ASGD"), P + 18 * BLOCK, P),
}


@pytest.mark.parametrize(("make", "kept", "temporary"), LISTS.values(), ids=LISTS)
def test_foreach_steps_make_lists(gpu: Any, make: Make, kept: int, temporary: int) -> None:
    assert charged(gpu, make, parameters_with_gradients()) == (kept, temporary)


LOOPS = {
    # _single_tensor_*: variables still refer to tensors of the bias when the next weight comes.
    "SGD": (of("SGD", lr=0.1, foreach=False), 0, 0),
    "SGD weight_decay": (of("SGD", lr=0.1, weight_decay=0.1, foreach=False), 0, W),
    "Adam": (of("Adam", foreach=False), 2 * P, 2 * W + B),  # sqrt, denom, the old denom
    "AdamW": (of("AdamW", foreach=False), 2 * P, 2 * W + B),
    "Adadelta": (of("Adadelta", foreach=False), 2 * P, 2 * W + B),  # std, delta, the old delta
    "Adagrad": (of("Adagrad", foreach=False), P, W + B),  # std
    "Adamax": (of("Adamax", foreach=False), 2 * P, W),  # abs of the gradient
    "NAdam": (of("NAdam", foreach=False), 2 * P, 2 * W + B),  # square, denom, the old denom
    "RAdam": (of("RAdam", foreach=False), 2 * P, 2 * W),  # bias_corrected_exp_avg, times lr
    "RMSprop": (of("RMSprop", foreach=False), P, W + B),  # avg
    "RMSprop centered": (of("RMSprop", centered=True, foreach=False), 2 * P, W + B),
    # The average starts as a copy; step, eta and mu of each parameter are on the device.
    "ASGD": (of("ASGD", foreach=False), P + 18 * BLOCK, 0),
    # sign, the clone of the gradient, its sign.
    "Rprop": (of("Rprop", foreach=False), 2 * P, 3 * W),
}


@pytest.mark.parametrize(("make", "kept", "temporary"), LOOPS.values(), ids=LOOPS)
def test_single_tensor_steps_go_one_by_one(gpu: Any, make: Make, kept: int, temporary: int) -> None:
    assert charged(gpu, make, parameters_with_gradients()) == (kept, temporary)


FUSED = {
    "SGD": (of("SGD", lr=0.1, fused=True), 0),
    "SGD momentum": (of("SGD", lr=0.1, momentum=0.9, fused=True), P),
    "Adam": (of("Adam", fused=True), 2 * P + 6 * BLOCK),
    "AdamW amsgrad": (of("AdamW", amsgrad=True, fused=True), 3 * P + 6 * BLOCK),
    "Adam, lr in a tensor": (of("Adam", lr=torch.tensor(0.1), fused=True), 2 * P + 6 * BLOCK),
    "Adagrad": (of("Adagrad", fused=True), P + 6 * BLOCK),
}


@pytest.mark.parametrize(("make", "kept"), FUSED.values(), ids=FUSED)
def test_fused_steps_have_no_temporaries(gpu: Any, make: Make, kept: int) -> None:
    try:
        found = charged(gpu, make, parameters_with_gradients())
    except RuntimeError as error:
        if "floating point Tensors of supported devices" not in str(error):
            raise
        pytest.skip(f"this torch has it for the CPU alone: {error}")
    assert found == (kept, 0)


@pytest.mark.usefixtures("plain_workspaces")
def test_adafactor_keeps_rows_and_columns(gpu: Any) -> None:
    # A row and a column of a matrix, all of a vector, and the workspace of their product. An
    # estimate of the weight's size with its row's and column's means and the row's mean, and
    # tensors of the bias that are still referenced: its square and its update.
    kept, temporary = charged(gpu, of("Adafactor"), parameters_with_gradients())
    assert kept == 3 * 3 * B + 8_519_680
    assert temporary == W + 4 * B + BLOCK


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with torch 2.9")
@pytest.mark.usefixtures("plain_workspaces")
def test_muon_keeps_one_buffer(gpu: Any) -> None:
    weights = [p for p in parameters_with_gradients() if p.dim() == 2]
    workspace = 8_519_680
    # update (float32, while nesterov's average replaces the gradient); in bfloat16 the matrix, its
    # Gram matrix, the polynomial of it and the next matrix, of which at most three live at once.
    kept, temporary = charged(gpu, of("Muon"), weights)
    half = 2_000_384
    assert kept == 3 * W + workspace
    assert W + 3 * half <= temporary <= 2 * W + 4 * half


def test_sparse_adam_keeps_dense_moments(gpu: Any) -> None:
    embedding = nn.Embedding(1000, 64, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))
    table = 1000 * 64 * 4
    tokens = torch.zeros(4, 10, dtype=torch.long, device="cuda")
    for _ in range(2):
        embedding(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert gpu.allocated == 3 * table + BLOCK  # the table, two moments, the tokens


# Code around a step.


def test_foreach_is_the_default_on_a_gpu(gpu: Any) -> None:
    optimizer = torch.optim.AdamW(parameters_with_gradients())
    with gpu.phase("first"):
        optimizer.step()
    assert gpu.phases["first"].peak_allocated == 2 * P + 3 * P  # parameters, gradients, 2 + 1 lists


def test_parameters_of_several_dtypes_are_stepped_by_dtype(gpu: Any) -> None:
    parameters = parameters_with_gradients()
    half = list(model().to(torch.bfloat16).parameters())
    for parameter in half:
        parameter.grad = torch.zeros_like(parameter)
    # The list of the first dtype is still referenced when that of the second is made.
    assert charged(gpu, of("AdamW"), [*parameters, *half])[1] == P + P_OF_HALVES


def test_frozen_parameters_have_no_state(gpu: Any) -> None:
    network = model()
    network[0].requires_grad_(False)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    kept, temporary = charged(gpu, of("AdamW"), list(network.parameters()))
    assert (kept, temporary) == (2 * (P - W - B), P - W - B)


def test_parameter_groups_are_stepped_one_after_the_other(gpu: Any) -> None:
    parameters = parameters_with_gradients()

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": parameters[:2], "lr": 0.1},
            {"params": parameters[2:]},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    assert charged(gpu, make, parameters) == (2 * P, P - W - B)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_frees_or_zeroes_gradients(gpu: Any, to_none: bool) -> None:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.zero_grad(set_to_none=to_none)
    assert gpu.allocated == (P if to_none else 2 * P)


@pytest.mark.usefixtures("plain_workspaces")
def test_accumulated_gradients_are_added_in_place(gpu: Any) -> None:
    network = model()
    x = torch.ones(1, 1000, device="cuda")
    for _ in range(3):
        network(x).sum().backward()
    gradients = sum(p.grad is not None for p in network.parameters())
    workspaces = 2 * 8_519_680  # forward's thread and autograd's
    assert gradients == 6
    assert gpu.allocated == 2 * P + B + workspaces


# Clipping.

CHUNKS = math.ceil(1_000_000 / 65_536)
NORMS = [
    6 * CHUNKS * 4,  # partial results: six tensors, chunks of the largest
    *[4] * 6,  # norms
    -6 * CHUNKS * 4,
    6 * 4,  # stacked
]
NORMS_SINCE_2_15 = [
    7 * 8,  # where each tensor's partial results begin, and their end
    (3 * CHUNKS + 3) * 4,  # partial results: three tensors of 16 chunks, three of one
    *[4] * 6,  # norms
]


def test_clip_grad_norm_uses_foreach_operators(on: Any) -> None:
    gpu = on()
    parameters = parameters_with_gradients()
    events = gpu.of(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
    norms = NORMS_SINCE_2_15 if torch.__version__ >= "2.15" else NORMS
    assert events[: len(norms)] == norms
    assert max(abs(event) for event in events) == max(norms)


def test_clip_grad_norm_without_foreach_runs_one_by_one(on: Any) -> None:
    gpu = on()
    parameters = parameters_with_gradients()
    events = gpu.of(lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False))
    assert 6 * CHUNKS * 4 not in events
    assert events.count(4) >= 6


def test_clip_grad_norm_with_error_if_nonfinite_finds_none(gpu: Any) -> None:
    parameters = parameters_with_gradients()
    nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert any("infinities" in note for note in gpu.notes)


def test_clip_grad_value_is_in_place(on: Any) -> None:
    gpu = on()
    parameters = parameters_with_gradients()
    assert gpu.of(lambda: nn.utils.clip_grad_value_(parameters, 1.0)) == []


# Loss scaling, averages, schedules.


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_has_its_tensors_and_flags(on: Any, fused: bool) -> None:
    gpu = on()
    network = model(1, 64)
    optimizer = torch.optim.AdamW(network.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.ones(1, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = network(x).sum()
    # The scale, the growth tracker, the scaled loss.
    assert gpu.of(lambda: scaler.scale(loss)) == [4, 4, 4]
    scaler.scale(loss).backward()
    events = gpu.of(lambda: scaler.unscale_(optimizer))
    # 1 / scale in double precision and as float32, a flag for infinities, and a copy of both.
    assert [event for event in events if event > 0] == [8, 8, 4, 4, 4, 4]
    before = [p.data_ptr() for p in network.parameters()]
    scaler.step(optimizer)
    events = gpu.of(scaler.update)
    assert sum(event for event in events if event > 0) == 0
    assert [p.data_ptr() for p in network.parameters()] == before


def test_an_averaged_model_is_a_copy(gpu: Any) -> None:
    network = model()
    average = swa_utils.AveragedModel(network)
    moving = swa_utils.AveragedModel(network, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        average.update_parameters(network)
        moving.update_parameters(network)
    assert gpu.allocated == 3 * P  # n_averaged is on the host


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=9, cycle_momentum=False
    ),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_learning_rate_schedules_allocate_nothing(gpu: Any, make: Any) -> None:
    optimizer = torch.optim.SGD(parameters_with_gradients(), lr=0.1)
    schedule = make(optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert gpu.allocated == 2 * P


def test_a_differentiable_step_keeps_its_graph(gpu: Any) -> None:
    start = torch.ones(1000, 1000, device="cuda", requires_grad=True)
    weight = start * 1.0
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    optimizer.step()
    F.mse_loss(weight, torch.zeros_like(weight)).backward()
    assert start.grad is not None
