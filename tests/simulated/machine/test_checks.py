"""Tensors of several devices or types in one operator, refused or allowed as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_gpumem import simulate

Operation = Callable[[torch.Tensor, torch.Tensor], Any]


def message(operation: Operation, other: str, **options: Any) -> str:
    """Return the error of ``operation`` on a CUDA tensor and one of the device ``other``."""
    with simulate("T4", **options):
        cuda = torch.ones(4, 4, device="cuda")
        with pytest.raises(Exception) as caught:  # the caller compares its text
            operation(cuda, torch.ones(4, 4, device=other))
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        (lambda x, y: x @ y, "mat2 of aten::mm"),
        (lambda x, y: F.linear(x, x, y[0]), "self of aten::addmm"),
        (lambda x, y: torch.cat([x, y]), "tensors of aten::cat"),
        (lambda x, y: torch.bmm(x[None], y[None]), "mat2 of aten::bmm"),
        (lambda x, y: x.gather(0, y.long()), "index of aten::gather"),
        (lambda x, y: F.embedding(y.long(), x), "indices of aten::embedding"),
        (lambda x, y: F.layer_norm(x, (4,), y[0]), "weight of aten::native_layer_norm"),
        (lambda x, y: F.cross_entropy(x, y[0].long()), "target of aten::nll_loss_forward"),
        (lambda x, y: torch.clamp(x, y, y), "min of aten::clamp"),
        (lambda x, y: x + y, "other of aten::add"),
        (lambda x, y: y + x, "self of aten::add"),
        (lambda x, y: x.add_(y), "other of aten::add"),
        (lambda x, y: torch.where(x > 0, x, y), "other of aten::where"),
        (lambda x, y: F.mse_loss(x, y), "target of aten::mse_loss"),
        (lambda x, y: torch._foreach_add([x], [y]), "other of aten::_foreach_add"),
        (lambda x, y: torch.add(x, x, out=y), "out of aten::add"),
        (lambda x, y: x.masked_fill(y > 0, 1.0), "mask of aten::masked_fill"),
    ],
)
def test_a_tensor_on_the_host_is_named_by_its_argument(operation: Operation, argument: str) -> None:
    assert message(operation, "cpu") == (
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        f"and cpu! ({argument})"
    )


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            lambda x, y: y[x[0].long()],
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        ),
        (
            lambda x, y: F.conv1d(x[None], y[None]),
            "Input type (torch.float32 on cuda:0) and weight type (torch.float32 on cpu) should be "
            "the same",
        ),
    ],
)
def test_some_operators_have_their_own_error_messages(operation: Operation, text: str) -> None:
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
def test_host_scalars_indices_and_copies_are_allowed(
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
    assert "cuda:0" in found
    assert "meta" in found


def test_a_repeated_refusal_leaves_no_memory_allocated() -> None:
    with simulate("T4") as gpu:
        x, y = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
        assert (x @ x).is_cuda
        allocated = gpu.allocated
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mat2 of aten::mm"):
                x @ y
        assert gpu.allocated == allocated


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            lambda x: F.linear(x, x.half()),
            "mm expects tensors of the same dtype, but got self torch.float32, mat2 torch.float16",
        ),
        (
            lambda x: F.linear(x, x.half(), x[0].half()),
            "addmm expects tensors of the same dtype, but got self torch.float16, mat1 "
            "torch.float32, mat2 torch.float16",
        ),
        (
            lambda x: x.addmm_(x.half(), x.half()),
            "addmm expects tensors of the same dtype, but got self torch.float32, mat1 "
            "torch.float16, mat2 torch.float16",
        ),
        (
            lambda x: F.layer_norm(x.half(), (4,), x[0], x[0]),
            "native_layer_norm expects tensors of the same dtype, but got input torch.float16, "
            "weight torch.float32, bias torch.float32",
        ),
        (
            lambda x: F.conv1d(x[None], x[None].half()),
            "Input type (torch.float32 on cuda:0) and weight type (torch.float16 on cuda:0) should "
            "be the same",
        ),
    ],
)
def test_errors_about_dtypes_name_both(operation: Callable[[torch.Tensor], Any], text: str) -> None:
    with simulate("T4"), pytest.raises(RuntimeError) as caught:
        operation(torch.ones(4, 4, device="cuda"))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("write", "given", "result"),
    [
        (lambda x: x.add_(2.5), "Float", "Long"),
        (lambda x: x.mul_(torch.ones(1, 4, device="cuda")), "Float", "Long"),
        (lambda x: x.div_(2), "Float", "Long"),
        (lambda x: x.addcmul_(torch.ones(4, device="cuda"), x), "Float", "Long"),
        (lambda x: x.bool().mul_(2), "Long", "Bool"),
        (lambda x: torch.exp(x, out=x), "Float", "Long"),
        (lambda x: x.float().mul_(1j), "ComplexFloat", "Float"),
    ],
)
def test_an_out_argument_of_a_lower_dtype_is_refused(
    write: Callable[[torch.Tensor], Any], given: str, result: str
) -> None:
    """Errors of the dry device with torch 2.15; torch's meta kernels accept the second call."""
    text = f"result type {given} can't be cast to the desired output type {result}"
    with simulate("T4"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                write(torch.ones(4, 4, device="cuda", dtype=torch.int64))


def test_an_out_argument_of_a_higher_dtype_is_accepted() -> None:
    with simulate("T4"):
        whole = torch.ones(4, device="cuda", dtype=torch.int64)
        torch.frexp(torch.ones(4, device="cuda"), out=(whole.float(), whole.int()))
        torch.add(whole, whole, out=whole.float())
        assert whole.mul_(2).tolist() == [2, 2, 2, 2]
        assert whole.double().div_(whole).tolist() == [1, 1, 1, 1]
