"""Types of tensors that CUDA has no kernel for, in torch's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.checks.names import scalar_type, tensor_type, type_meta

Operation = Callable[[torch.Tensor], Any]


def refusal(operation: Operation, version: str = "2.13", **options: Any) -> Exception:
    """What torch raises for ``operation`` on a 4 by 4 CUDA tensor of float32."""
    with (
        simulate("T4", torch_version=version, **options),
        pytest.raises(Exception) as caught,  # the caller looks at it
    ):
        operation(torch.ones(4, 4, device="cuda"))
    return caught.value


@pytest.mark.parametrize(
    ("operation", "kernel", "name"),
    [
        (lambda x: x.long() @ x.long(), "addmm_cuda", "Long"),
        (lambda x: F.linear(x.int(), x.int(), x[0].int()), "addmm_cuda", "Int"),
        (lambda x: torch.bmm(x[None].short(), x[None].short()), "baddbmm_cuda", "Short"),
        (lambda x: x.long() @ x[0].long(), "addmv_impl_cuda", "Long"),
        (lambda x: torch.dot(x[0].long(), x[0].long()), "dot", "Long"),
        (lambda x: F.softmax(x.long(), -1), "host_softmax", "Long"),
        (lambda x: F.log_softmax(x.bool(), -1), "host_softmax", "Bool"),
        (lambda x: F.gelu(x.long()), "GeluCUDAKernelImpl", "Long"),
        (lambda x: F.dropout(x.long()), "fused_dropout", "Long"),
        (lambda x: F.mse_loss(x.long(), x.long()), "mse_cuda", "Long"),
        (lambda x: F.layer_norm(x.long(), (4,)), "LayerNormKernelImpl", "Long"),
        (
            lambda x: F.max_pool2d(x[None].long(), 2),
            "max_pool2d_with_indices_out_cuda_frame",
            "Long",
        ),
        (
            lambda x: F.conv2d(x[None, None].long(), x[None, None].long()),
            "slow_conv2d_cuda",
            "Long",
        ),
        (lambda x: x & x, "bitwise_and_cuda", "Float"),
        (lambda x: torch.bitwise_left_shift(x, x), "lshift_cuda", "Float"),
        (lambda x: x < x.to(torch.complex64), "compare_cuda", "ComplexFloat"),
        (lambda x: torch.linalg.qr(x.half()), "geqrf_cuda", "Half"),
        (lambda x: torch.special.bessel_j0(x.half()), "bessel_j0_cuda", "Half"),
        (lambda x: torch.arange(3, dtype=torch.bool, device="cuda"), "arange_cuda", "Bool"),
        (lambda x: x.index_select(0, x[0]), "index_select_out_cuda_impl", "Float"),
    ],
)
def test_kernels_are_compiled_for_some_types(operation: Operation, kernel: str, name: str) -> None:
    error = refusal(operation)
    assert isinstance(error, NotImplementedError)
    assert str(error) == f"\"{kernel}\" not implemented for '{name}'"


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            lambda x: F.linear(x, x.half()),
            "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
        ),
        (
            lambda x: F.linear(x, x.half(), x[0].half()),
            "mat1 and mat2 must have the same dtype, but got Float and Half",
        ),
        (
            lambda x: F.linear(x, x, x[0].half()),
            "self and mat2 must have the same dtype, but got Half and Float",
        ),
        (
            lambda x: torch.bmm(x[None], x[None].half()),
            "expected scalar type Float but found Half",
        ),
        (
            lambda x: torch.baddbmm(x[None].half(), x[None], x[None]),
            "Input dtypes must be the same, got: input c10::Half, batch1: float, batch2: float",
        ),
        (
            lambda x: F.layer_norm(x.half(), (4,), x[0], x[0]),
            "expected scalar type Half but found Float",
        ),
        (
            lambda x: F.group_norm(x, 2, x[0].half()),
            "mixed dtype (CPU): expect parameter to have scalar type of Float",
        ),
        (
            lambda x: F.conv1d(x[None], x[None].half()),
            "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should "
            "be the same",
        ),
        (
            lambda x: F.conv1d(x[None].bfloat16(), x[None]),
            "Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) should be "
            "the same",
        ),
        (
            lambda x: F.embedding(x[0], x),
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            "Long, Int; but got torch.cuda.FloatTensor instead (while checking arguments for "
            "embedding)",
        ),
        (
            lambda x: F.cross_entropy(x, x[0].int()),
            "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
        ),
        (
            lambda x: F.cross_entropy(x[None], x[None, 0].int()),
            "expected scalar type Long but found Int",
        ),
        (
            lambda x: x.masked_fill(x.long(), 0),
            "masked_fill only supports boolean masks, but got dtype Long",
        ),
        (
            lambda x: torch.where(x.long(), x, x),
            "where expected condition to be a boolean tensor, but got a tensor with dtype Long",
        ),
        (lambda x: x[x], "tensors used as indices must be long, int, byte or bool tensors"),
        (
            lambda x: x.long().exp_(),
            "result type Float can't be cast to the desired output type Long",
        ),
        (
            lambda x: x.add_(x.to(torch.complex64)),
            "result type ComplexFloat can't be cast to the desired output type Float",
        ),
        (lambda x: x.long().std(), "std and var only support floating point and complex dtypes"),
        (
            lambda x: torch.maximum(x, x.to(torch.complex64)),
            "maximum not implemented for complex tensors.",
        ),
        (
            lambda x: torch.fft.fft(x[0, :3].half()),
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
            "precision, but got a signal size of[3]",
        ),
    ],
)
def test_operators_that_combine_types_say_which(operation: Operation, text: str) -> None:
    assert str(refusal(operation)) == text


def test_logaddexp_takes_complex_numbers_after_2_6() -> None:
    def add(x: torch.Tensor) -> Any:
        return torch.logaddexp(x, x.to(torch.complex64))

    assert str(refusal(add, "2.6")) == "\"logaddexp_cuda\" not implemented for 'ComplexFloat'"
    with simulate("T4", torch_version="2.13"):
        assert add(torch.ones(4, 4, device="cuda")).is_complex()


def test_32_bit_indices_are_taken_since_2_8() -> None:
    def gather(x: torch.Tensor) -> Any:
        return torch.ops.aten.gather(x, 0, x.int())

    assert str(refusal(gather, "2.7")) == "gather(): Expected dtype int64 for index"
    assert str(refusal(lambda x: x.gather(0, x), "2.8")).startswith(
        "gather(): Expected dtype int32/int64 for index"
    )


@pytest.mark.parametrize("version", ["2.6", "2.13"])
def test_the_same_is_refused_where_values_are_computed(version: str) -> None:
    error = refusal(lambda x: F.softmax(x.long(), -1), version, real_values=True)
    assert str(error) == "\"host_softmax\" not implemented for 'Long'"


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


def test_types_have_three_names() -> None:
    assert scalar_type(torch.float16) == "Half"
    assert type_meta(torch.float16) == "c10::Half"
    assert tensor_type(torch.float16, on_gpu=True) == "torch.cuda.HalfTensor"
    assert tensor_type(torch.bfloat16, on_gpu=True) == "CUDABFloat16Type"
    assert tensor_type(torch.float32, on_gpu=False) == "torch.FloatTensor"
