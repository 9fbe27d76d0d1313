"""Types of tensors that CUDA has no kernel for, or does not combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_gpumem import simulate

Operation = Callable[[torch.Tensor], Any]


def refusal(operation: Operation, **options: Any) -> Exception:
    """What is raised for ``operation`` on a 4 by 4 CUDA tensor of float32."""
    with (
        simulate("T4", **options),
        pytest.raises(Exception) as caught,  # the caller looks at it
    ):
        operation(torch.ones(4, 4, device="cuda"))
    return caught.value


@pytest.mark.parametrize(
    ("operation", "operator", "dtype"),
    [
        (lambda x: x.long() @ x.long(), "mm", "int64"),
        (lambda x: F.linear(x.int(), x.int(), x[0].int()), "addmm", "int32"),
        (lambda x: torch.bmm(x[None].short(), x[None].short()), "bmm", "int16"),
        (lambda x: x.long() @ x[0].long(), "mv", "int64"),
        (lambda x: torch.dot(x[0].long(), x[0].long()), "dot", "int64"),
        (lambda x: F.softmax(x.long(), -1), "_softmax", "int64"),
        (lambda x: F.log_softmax(x.bool(), -1), "_log_softmax", "bool"),
        (lambda x: F.gelu(x.long()), "gelu", "int64"),
        (lambda x: F.dropout(x.long()), "native_dropout", "int64"),
        (lambda x: F.mse_loss(x.long(), x.long()), "mse_loss", "int64"),
        (lambda x: F.layer_norm(x.long(), (4,)), "native_layer_norm", "int64"),
        (lambda x: F.max_pool2d(x[None].long(), 2), "max_pool2d_with_indices", "int64"),
        (lambda x: F.conv2d(x[None, None].long(), x[None, None].long()), "convolution", "int64"),
        (lambda x: x & x, "bitwise_and", "float32"),
        (lambda x: torch.bitwise_left_shift(x, x), "bitwise_left_shift", "float32"),
        (lambda x: x < x.to(torch.complex64), "lt", "complex64"),
        (lambda x: torch.maximum(x, x.to(torch.complex64)), "maximum", "complex64"),
        (lambda x: torch.linalg.qr(x.half()), "linalg_qr", "float16"),
        (lambda x: torch.special.bessel_j0(x.half()), "special_bessel_j0", "float16"),
        (lambda x: x.long().std(), "std", "int64"),
        (lambda x: x.long().round(decimals=1), "round (decimals)", "int64"),
        (lambda x: torch.arange(3, dtype=torch.bool, device="cuda"), "arange", "bool"),
        (lambda x: x.index_select(0, x[0]), "index_select (index)", "float32"),
        (lambda x: x.gather(0, x), "gather (index)", "float32"),
        (lambda x: F.cross_entropy(x, x[0].int()), "nll_loss_forward (target)", "int32"),
        (
            lambda x: F.cross_entropy(x[None], x[None, 0].int()),
            "nll_loss2d_forward (target)",
            "int32",
        ),
    ],
)
def test_kernels_are_compiled_for_some_types(
    operation: Operation, operator: str, dtype: str
) -> None:
    error = refusal(operation)
    assert isinstance(error, NotImplementedError)
    assert str(error) == f'"{operator}" not implemented on CUDA for torch.{dtype}'


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
            lambda x: F.layer_norm(x.half(), (4,), x[0], x[0]),
            "native_layer_norm expects tensors of the same dtype, but got input torch.float16, "
            "weight torch.float32, bias torch.float32",
        ),
        (
            lambda x: F.group_norm(x, 2, x[0].half()),
            "native_group_norm expects tensors of the same dtype, but got input torch.float32, "
            "weight torch.float16",
        ),
        (
            lambda x: F.conv1d(x[None], x[None].half()),
            "Input type (torch.float32 on cuda:0) and weight type (torch.float16 on cuda:0) should "
            "be the same",
        ),
        (
            lambda x: x.add_(x.to(torch.complex64)),
            "add_: result type torch.complex64 can't be cast to the desired output type "
            "torch.float32",
        ),
        (
            lambda x: torch.fft.fft(x[0, :3].half()),
            "cuFFT takes only powers of two in half precision, but got [3]",
        ),
    ],
)
def test_operators_that_combine_types_say_which(operation: Operation, text: str) -> None:
    assert str(refusal(operation)) == text


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.bmm(x[None], x[None].half()),
        lambda x: torch.baddbmm(x[None].half(), x[None], x[None]),
        lambda x: F.embedding(x[0], x),
        lambda x: x.masked_fill(x.long(), 0),
        lambda x: torch.where(x.long(), x, x),
        lambda x: x[x],
        lambda x: x.long().exp_(),
    ],
)
def test_other_types_are_refused_by_meta_kernels(operation: Operation) -> None:
    assert isinstance(refusal(operation), (RuntimeError, IndexError))


def test_the_same_is_refused_where_values_are_computed() -> None:
    error = refusal(lambda x: F.softmax(x.long(), -1), real_values=True)
    assert str(error) == '"_softmax" not implemented on CUDA for torch.int64'


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.embedding(x[0].int(), x.long()),
        lambda x: F.batch_norm(x.half(), x[0], x[0], x[0], x[0], training=True),
        lambda x: x.long().floor(),
        lambda x: x.long().bernoulli_(0.5),
        lambda x: x.bool().cumsum(0),
        lambda x: x.int() / 2,
        lambda x: x.to(torch.complex64) @ x.to(torch.complex64),
        lambda x: x.long()[:0] @ x.long(),
        lambda x: x.half().add_(x),
        lambda x: F.relu(x.long()),
        lambda x: x.long().erf(),
        lambda x: torch.fft.fft(x[0, :3]),
    ],
)
def test_what_cuda_computes_is_not_refused(operation: Operation) -> None:
    with simulate("T4"):
        operation(torch.ones(4, 4, device="cuda"))


def test_a_refused_operator_leaves_no_memory() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(64, 64, dtype=torch.int64, device="cuda")
        for _ in range(2):
            with pytest.raises(NotImplementedError):
                x @ x
        assert gpu.allocated == 64 * 64 * 8
