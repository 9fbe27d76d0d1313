"""A training loop, predicted to the byte."""

from __future__ import annotations

import pytest
import torch

from examples.memory_of_training import closed_form
from examples.memory_of_training.closed_form import in_blocks
from examples.memory_of_training.experiments import Read
from examples.memory_of_training.timelines import (
    MakeOptimizer,
    optimizer_timeline,
    step_timeline,
)
from pytest_gpumem import simulate

optimizers = pytest.mark.parametrize(
    ("optimizer", "state_copies"),
    [pytest.param(torch.optim.SGD, 0, id="SGD"), pytest.param(torch.optim.Adam, 2, id="Adam")],
)


def predicted(state_copies: int) -> dict[str, int]:
    timeline = closed_form.optimizer_timeline(state_copies)
    return {event: sum(categories.values()) for event, categories in timeline.items()}


@optimizers
def test_every_event_is_predicted_to_the_byte(optimizer: MakeOptimizer, state_copies: int) -> None:
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=":0:0"):
        assert optimizer_timeline(optimizer) == predicted(state_copies)


@pytest.mark.gpumem(max_leak=0, baseline=False)
@optimizers
def test_every_event(optimizer: MakeOptimizer, state_copies: int, tensors_alone: Read) -> None:
    assert optimizer_timeline(optimizer, tensors_alone) == predicted(state_copies)


def test_two_steps_of_adam_in_bytes() -> None:
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=":0:0"):
        assert optimizer_timeline(torch.optim.Adam, steps=2) == {
            "baseline": 0,
            "model_allocation": 257_024,
            "optimizer_init": 257_024,
            "input_allocation": 359_424,
            "optim_zero_grad_1": 359_424,
            "forward_1": 459_776,
            "backward_1": 716_800,
            "optim_step_1": 1_130_496,
            "optim_zero_grad_2": 873_472,
            "forward_2": 973_824,
            "backward_2": 1_230_848,
            "optim_step_2": 1_130_496,
        }


def test_between_the_events_adam_needs_one_more_copy_of_the_model() -> None:
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=":0:0"):
        moments = step_timeline(torch.optim.Adam, blocks=4)
    phases = ["zero_grad", "forward", "backward", "step"]
    assert list(dict.fromkeys(moment.phase for moment in moments)) == phases

    model, x, loss = closed_form.deep_network(4), in_blocks(500, 200), in_blocks()
    parameters = gradients = model
    between_steps = parameters + gradients + 2 * model + x + loss
    assert moments[-1].allocated == between_steps
    highest = max(moment.allocated for moment in moments if moment.phase == "step")
    assert highest == between_steps + model


def test_within_a_step_intermediates_come_and_go() -> None:
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=":0:0"):
        moments = step_timeline(torch.optim.Adam, blocks=4)
    last = {moment.phase: moment.segments for moment in moments}
    model, loss = closed_form.deep_network(4), in_blocks()
    # Backward needs the outputs of ReLU and Sigmoid in each block.
    intermediates = 4 * (in_blocks(500, 100) + in_blocks(500, 200)) + loss
    kept = 3 * model + in_blocks(500, 200)

    def held(gradient: int, intermediate_tensors: int) -> dict[str, int]:
        return {
            "kept": kept,
            "gradient": gradient,
            "intermediate_tensors": intermediate_tensors,
            "optimizer_state": 0,
            "temporary": 0,
        }

    assert last["zero_grad"] == held(0, 0)
    assert last["forward"] == held(0, intermediates)
    assert last["backward"] == held(model, loss)
    assert last["step"] == held(model, loss)
    # The optimizer's additional copy of the model is temporary.
    assert max(m.segments["temporary"] for m in moments if m.phase == "step") == model
