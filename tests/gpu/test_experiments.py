"""Memory of training on this device, whose workspaces follow the plugin's rule.

The experiments are those of ``examples/memory_of_training``, which has the numbers of a T4.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.memory_of_training import closed_form, experiments
from examples.memory_of_training.closed_form import in_blocks
from examples.memory_of_training.experiments import Read
from examples.memory_of_training.timelines import (
    MakeOptimizer,
    optimizer_timeline,
    step_timeline,
)
from pytest_gpumem.measurement.nvml import NvmlAbsent
from tests.conftest import REPOSITORY
from tests.forked import quick
from tests.gpu.device import is_dry, kept_workspaces

MODEL = 257_024
"""Bytes of Linear(256, 250): a weight of 256,000 and a bias of 1,000, each in whole blocks."""
TENSORS = MODEL + 1_024 + 1_024
"""The model, its input and its output."""
ELEMENTS = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
}


@pytest.fixture
def read() -> Read:
    """Return a function: bytes allocated since the test began."""
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.memory_allocated() - before


@pytest.fixture
def tensors_alone() -> Read:
    """Return a function: bytes allocated since the test began, less workspaces."""
    before = experiments.without_workspaces()
    return lambda: experiments.without_workspaces() - before


def test_reserved_memory_stays_when_a_tensor_is_deleted() -> None:
    seen = experiments.reserved_and_allocated()

    reserved, allocated = seen["start"]
    changes = {name: (r - reserved, a - allocated) for name, (r, a) in seen.items()}
    # A segment is new only if no small block is live whose segment has room for the tensor.
    segment = 2_097_152 if allocated == 0 else changes["tensor"][0]
    assert changes == {
        "start": (0, 0),
        "tensor": (segment, 4_096),
        "deleted": (segment, 0),
        "cache emptied": (0, 0),
    }


def test_elements_have_the_size_of_their_dtype() -> None:
    assert experiments.bytes_per_element() == ELEMENTS


def test_800_floats_take_seven_blocks() -> None:
    assert experiments.tensor_of(800) == 3_584


def test_allocated_bytes_grow_in_steps_of_512() -> None:
    steps = experiments.staircase()
    assert steps == [in_blocks(elements) for elements in range(1050)]
    assert (steps[0], steps[128], steps[129], steps[1049]) == (0, 512, 1_024, 4_608)


def test_device_used_exceeds_reserved_memory() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    use = experiments.device_use()
    if isinstance(use, NvmlAbsent):
        pytest.skip(use.reason)
    # The CUDA context comes on top; the dry device has none.
    context = 0 if is_dry() else 1
    reserved = torch.cuda.memory_reserved()
    assert x.nbytes <= reserved <= use.used - context < use.total
    if use.process_used is not None:
        assert reserved <= use.process_used - context
        assert use.process_used <= use.used


def test_forward_of_a_linear_layer_keeps_output_and_workspace(read: Read) -> None:
    seen = experiments.linear_layer(backward=False, read=read)

    workspace = seen["forward"] - TENSORS
    assert workspace in kept_workspaces()
    assert seen == {
        "start": 0,
        "model": MODEL,
        "input": MODEL + 1_024,
        "forward": TENSORS + workspace,
        "deleted": workspace,
        "workspaces cleared": 0,
    }


def test_backward_of_a_linear_layer_has_its_own_workspace(read: Read) -> None:
    seen = experiments.linear_layer(backward=True, read=read)

    kept = kept_workspaces()
    forward = seen["forward"] - TENSORS
    # Backward runs on autograd's thread, which has its own cuBLAS workspace.
    backward = seen["backward"] - seen["forward"] - MODEL
    assert {forward, backward} <= kept
    assert seen["deleted"] == forward + backward
    assert seen["workspaces cleared"] == 0


@pytest.mark.parametrize(
    ("compute", "weights", "saved", "kept"),
    closed_form.INTERMEDIATES.values(),
    ids=closed_form.INTERMEDIATES,
)
def test_operators_save_the_tensors_of_their_closed_form(
    compute: Callable[..., Tensor],
    weights: list[tuple[int, int]],
    saved: list[tuple[int, ...]],
    kept: int,
) -> None:
    x = torch.randn(100, 256, device="cuda")
    trained = [torch.randn(shape, device="cuda", requires_grad=True) for shape in weights]
    assert experiments.saved_for_backward(compute, x, *trained) == saved
    assert experiments.kept_for_backward(compute, x, *trained) == kept


def test_layer_norm_of_operators_keeps_one_intermediate(tensors_alone: Read) -> None:
    x = w = y = intermediate = 512
    assert experiments.layer_norm_by_hand(tensors_alone) == x + w + y + intermediate


@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_a_deep_network_takes_its_closed_forms_bytes(tensors_alone: Read, blocks: int) -> None:
    model, x, hidden = closed_form.deep_network(blocks), in_blocks(5, 200), in_blocks(5, 100)

    inference = experiments.deep_forward(blocks, inference=True, read=tensors_alone)
    training = experiments.deep_forward(blocks, inference=False, read=tensors_alone)
    backward = experiments.deep_backward(blocks, tensors_alone)

    assert inference == model + x + x
    # Training keeps the input of every linear layer; backward trades them for gradients.
    assert training == inference + blocks * hidden + (blocks - 1) * x
    assert backward == inference + model


optimizers = pytest.mark.parametrize(
    ("optimizer", "state_copies"),
    [pytest.param(torch.optim.SGD, 0, id="SGD"), pytest.param(torch.optim.Adam, 2, id="Adam")],
)


def predicted(state_copies: int) -> dict[str, int]:
    timeline = closed_form.optimizer_timeline(state_copies)
    return {event: sum(held.values()) for event, held in timeline.items()}


@optimizers
def test_an_optimizer_timeline_equals_its_closed_form(
    optimizer: MakeOptimizer, state_copies: int, tensors_alone: Read
) -> None:
    assert optimizer_timeline(optimizer, tensors_alone) == predicted(state_copies)


TIMELINE = """
import json, torch
from examples.memory_of_training.timelines import optimizer_timeline
from tests.gpu.device import device_under_test

with device_under_test():
    print(json.dumps(optimizer_timeline(torch.optim.NAME)))
"""


@optimizers
def test_an_optimizer_timeline_without_workspaces(optimizer: type, state_copies: int) -> None:
    # cuBLAS reads the setting once in a process.
    ran = subprocess.run(
        [quick(), "-c", TIMELINE.replace("NAME", optimizer.__name__)],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == predicted(state_copies)


def test_adam_allocates_one_copy_of_the_model_within_a_step() -> None:
    moments = step_timeline(torch.optim.Adam, blocks=4)

    phases = ["zero_grad", "forward", "backward", "step"]
    assert list(dict.fromkeys(moment.phase for moment in moments)) == phases
    milliseconds = [moment.milliseconds for moment in moments]
    assert milliseconds == sorted(milliseconds)
    highest = max(moment.allocated for moment in moments if moment.phase == "step")
    assert highest == moments[-1].allocated + closed_form.deep_network(4)
