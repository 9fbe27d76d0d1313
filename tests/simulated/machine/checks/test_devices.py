"""Tensors of several devices in one operator, refused in torch's words or allowed as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_gpumem import simulate

Operation = Callable[[torch.Tensor, torch.Tensor], Any]

BETWEEN = "Expected all tensors to be on the same device, but"


def message(operation: Operation, other: str, version: str = "2.13", **options: Any) -> str:
    """What torch says to ``operation`` on a CUDA tensor and one of the device ``other``."""
    with simulate("T4", torch_version=version, **options):
        cuda = torch.ones(4, 4, device="cuda")
        with pytest.raises(Exception) as caught:  # the caller looks at its text
            operation(cuda, torch.ones(4, 4, device=other))
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "argument", "kernel"),
    [
        (lambda x, y: x @ y, "mat2", "mm"),
        (lambda x, y: F.linear(x, x, y[0]), "mat1", "addmm"),
        (lambda x, y: torch.cat([x, y]), "tensors", "cat"),
        (lambda x, y: torch.bmm(x[None], y[None]), "mat2", "bmm"),
        (lambda x, y: x.gather(0, y.long()), "index", "gather"),
        (lambda x, y: F.embedding(y.long(), x), "index", "_index_select"),
        (lambda x, y: F.layer_norm(x, (4,), y[0]), "weight", "_native_layer_norm"),
        (lambda x, y: F.cross_entropy(x, y[0].long()), "target", "nll_loss_forward"),
        (lambda x, y: torch.clamp(x, y, y), "min", "clamp_Tensor"),
        (lambda x, y: torch.clamp(x, y[0, 0]), "min", "clamp_Tensor"),
    ],
)
def test_kernels_name_the_argument_that_is_elsewhere(
    operation: Operation, argument: str, kernel: str
) -> None:
    first = ("cpu", "cuda:0") if argument == "mat1" else ("cuda:0", "cpu")
    assert message(operation, "cpu", "2.6") == (
        f"{BETWEEN} found at least two devices, {first[0]} and {first[1]}! (when checking argument "
        f"for argument {argument} in method wrapper_CUDA_{kernel})"
    )
    assert message(operation, "cpu", "2.8") == (
        f"{BETWEEN} got {argument} is on {first[1]}, different from other tensors on {first[0]} "
        f"(when checking argument in method wrapper_CUDA_{kernel})"
    )


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: x.add_(y),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: torch.add(x, x, out=y),
    ],
)
def test_elementwise_operators_name_both_devices(operation: Operation) -> None:
    assert message(operation, "cpu") == f"{BETWEEN} found at least two devices, cuda:0 and cpu!"


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            lambda x, y: y[x[0].long()],
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        ),
        (
            lambda x, y: x.masked_fill(y > 0, 1.0),
            "expected self and mask to be on the same device, but got mask on cpu and self on "
            "cuda:0",
        ),
        (
            lambda x, y: F.conv1d(x[None], y[None]),
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be "
            "the same",
        ),
    ],
)
def test_some_operators_have_words_of_their_own(operation: Operation, text: str) -> None:
    assert message(operation, "cpu") == text


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y[0, 0],
        lambda x, y: x[y[0].long()],
        lambda x, y: x[:, [0, 1]],
        lambda x, y: torch.where(x > 0, x, y[0, 0]),
        lambda x, y: x.masked_fill(x > 0, y[0, 0]),
        lambda x, y: x.masked_fill_(x > 0, y[0, 0]),
        lambda x, y: x.copy_(y),
        lambda x, y: y.copy_(x),
        lambda x, y: x.__setitem__(0, 1.0),
        lambda x, y: x.__setitem__(x > 0, 1.0),
        lambda x, y: x.__setitem__(y > 0, y[0, 0]),
    ],
)
@pytest.mark.parametrize("real_values", [False, True])
def test_numbers_indices_and_copies_of_the_host_are_allowed(
    operation: Operation, real_values: bool
) -> None:
    with simulate("T4", real_values=real_values):
        operation(torch.ones(4, 4, device="cuda"), torch.ones(4, 4))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: F.linear(x, y),
        lambda x, y: F.linear(x, y, y[0]),
        lambda x, y: x.add_(y),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x + y[0, 0],
        lambda x, y: F.conv1d(x[None], y[None]),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: F.layer_norm(x, (4,), y[0]),
        lambda x, y: x.gather(0, y.long()),
    ],
)
@pytest.mark.parametrize("real_values", [False, True])
def test_meta_tensors_are_refused_beside_cuda_tensors(
    operation: Operation, real_values: bool
) -> None:
    found = message(operation, "meta", real_values=real_values)
    assert found in (
        "Tensor on device meta is not on the expected device cuda:0!",
        "Tensor on device cuda:0 is not on the expected device meta!",
    )


def test_the_first_tensor_says_which_device_is_expected() -> None:
    ours = "Tensor on device {} is not on the expected device {}!"
    assert message(lambda x, y: x * y, "meta") == ours.format("meta", "cuda:0")
    assert message(lambda x, y: y * x, "meta") == ours.format("cuda:0", "meta")
    assert message(lambda x, y: torch.add(x, x, out=y), "meta") == (
        "Attempting to copy from device cuda:0 to device meta, but cross-device copies are not "
        "allowed!"
    )
    assert message(lambda x, y: x[y[0].long()], "meta") == (
        "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)"
    )


def test_what_was_refused_is_refused_again_and_leaves_no_memory() -> None:
    with simulate("T4") as gpu:
        x, y = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
        assert (x @ x).is_cuda
        allocated = gpu.allocated
        for _ in range(2):
            with pytest.raises(RuntimeError, match="wrapper_CUDA_mm"):
                x @ y
        assert gpu.allocated == allocated
