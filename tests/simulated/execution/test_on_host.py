"""CPU tensors beside a simulated GPU: gradients that come to the host, and unknown values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

FLOATS = 5000
"""More than are computed beside their shapes."""
BYTES = 4 * FLOATS


def events(gpu: SimulatedRun) -> list[int]:
    """Return the bytes allocated, and below zero those freed, of tensors of ``BYTES``."""
    signs = {"alloc": 1, "free_completed": -1}
    signed = [signs.get(entry.action, 0) * entry.size for entry in gpu.trace]
    return [size for size in signed if abs(size) == BYTES]


def test_a_gradient_is_copied_back_to_the_host() -> None:
    with simulate("T4") as gpu:
        x = torch.rand(FLOATS, requires_grad=True)
        (x.cuda() * 2).sum().backward()
        # The copy, which mul by a number does not save, and the product, which sum does not save;
        # then the gradient of the copy.
        assert events(gpu) == [BYTES, BYTES, -BYTES, -BYTES, BYTES, -BYTES]
        assert x.grad is not None
        assert (x.grad.device.type, x.grad.shape, x.grad.is_leaf) == ("cpu", x.shape, True)
        assert gpu.allocated == 0
        with pytest.raises(UnknownValueError, match=r"tolist\(\) at .*test_on_host"):
            x.grad.tolist()


def test_known_gradients_stay_known_on_the_host() -> None:
    with simulate("T4"):
        x = torch.rand(8, requires_grad=True)
        for _ in range(2):
            (x.cuda() * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [4.0] * 8


class Offloaded(torch.autograd.Function):
    """A custom autograd function that copies to the GPU."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.cuda()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].cpu()


ROADS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to("cuda").exp(),
    "converted": lambda x: x.to("cuda", torch.float16).exp(),
    "computed before": lambda x: (x.exp() * x).cuda().exp(),
    "copied into": lambda x: torch.zeros(FLOATS, device="cuda").copy_(x).exp(),
    "written into": lambda x: torch.zeros(2, FLOATS, device="cuda").index_put(
        (torch.tensor(0),), x.cuda()
    ),
    "to and fro": lambda x: x.cuda().exp().cpu().exp().cuda().exp(),
    "loss on the host": lambda x: x.cuda().exp().cpu() * x,
    "in a function": lambda x: Offloaded.apply(x).exp(),  # type: ignore[no-untyped-call]  # torch
    "recomputed": lambda x: checkpoint(lambda y: y.cuda().exp().cpu(), x, use_reentrant=False),
    "recomputed reentrantly": lambda x: checkpoint(
        lambda y: y.cuda().exp().cpu(), x, use_reentrant=True
    ),
    "beside a number of the host": lambda x: x.cuda().exp() * x.mean(),
    "a chosen number": lambda x: torch.where(x.cuda() > 0, x.mean(), x.cuda()),
}


@pytest.mark.parametrize("real_values", [False, True])
@pytest.mark.parametrize("road", ROADS)
def test_every_copy_of_a_cpu_leaf_to_a_gpu_has_a_gradient(road: str, real_values: bool) -> None:
    start = torch.linspace(-1, 1, FLOATS)
    with simulate("T4", real_values=real_values) as gpu:
        x = start.clone().requires_grad_()
        seen: list[Any] = []
        x.register_hook(lambda gradient: seen.append(gradient.device.type))
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.device.type))
        ROADS[road](x).sum().backward()
        assert seen == ["cpu", "cpu"]
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
        assert gpu.allocated == 0
    if real_values and road == "loss on the host":
        # The derivative of x * exp(x).
        assert torch.allclose(x.grad, start.exp() * (start + 1), atol=1e-6)


def test_the_gradient_of_a_loss_on_the_host_reaches_the_gpu() -> None:
    with simulate("T4") as gpu:
        w = torch.rand(FLOATS, device="cuda", requires_grad=True)
        w.cpu().sum().backward()
        assert w.grad is not None
        assert w.grad.is_cuda
        # The weight, and the gradient that came from the host.
        assert events(gpu) == [BYTES, BYTES]


def test_a_layer_on_the_host_follows_one_on_the_gpu() -> None:
    with simulate("T4"):
        first, second = nn.Linear(8, 512).cuda(), nn.Linear(512, 64)
        second(first(torch.rand(16, 8, device="cuda")).cpu()).square().mean().backward()
        places = [parameter.grad.device.type for parameter in (*first.parameters(),)]  # type: ignore[union-attr]  # backward made it
        assert places == ["cuda", "cuda"]
        assert second.weight.grad is not None
        assert second.weight.grad.device.type == "cpu"


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_parameters_on_the_host_are_updated_on_the_host(kind: Any, how: Any) -> None:
    with simulate("T4", torch_version="2.6") as gpu:
        layer = nn.Linear(80, 80)
        optimizer = kind(layer.parameters(), lr=0.1, **how)
        for _ in range(2):
            x = torch.rand(16, 80, device="cuda")
            F.linear(x, layer.weight.to("cuda"), layer.bias.to("cuda")).sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for state in optimizer.state.values():
            assert {v.device.type for v in state.values() if isinstance(v, Tensor)} <= {"cpu"}
        # The last input, and a workspace for each of forward's and backward's thread.
        assert gpu.allocated == 16 * 80 * 4 + 2 * 8_519_680
        with pytest.raises(UnknownValueError):
            layer.weight.tolist()


def test_autograd_grad_returns_first_and_second_derivatives() -> None:
    with simulate("T4"):
        x = torch.rand(FLOATS, requires_grad=True)
        (first,) = torch.autograd.grad(x.cuda().pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert (first.device.type, second.device.type) == ("cpu", "cpu")
        assert first.requires_grad


def test_save_on_cpu_keeps_saved_tensors_on_the_host() -> None:
    with simulate("T4") as gpu:
        w = torch.rand(FLOATS, device="cuda", requires_grad=True)
        with save_on_cpu():
            y = w.exp().sum()
        # The exponentials are on the host until backward.
        assert gpu.allocated == 20_480 + 512
        y.backward()
        assert w.grad is not None
        assert w.grad.is_cuda


def test_an_assigned_gradient_has_to_be_where_its_tensor_is() -> None:
    sentence = (
        "attempting to assign a gradient with device type '{}' to a tensor with device type '{}'. "
        "Please ensure that the gradient and the tensor are on the same device"
    )
    with simulate("T4*2"):
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            p = torch.zeros(4, device=here, requires_grad=True)
            with pytest.raises(RuntimeError) as caught:
                p.grad = torch.zeros(4, device=there)
            assert str(caught.value) == sentence.format(there, here)
            p.grad = torch.ones(4, device=here)
            assert p.grad.tolist() == [1.0] * 4
            del p.grad
            assert p.grad is None
        with pytest.raises(RuntimeError, match="located on device with index '1' to a tensor loc"):
            p.grad = torch.zeros(4, device="cuda:1")
        with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
            p.grad = torch.zeros(3, device="cuda")


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.untyped_storage()[0],
        lambda y: y.untyped_storage().tolist(),
        lambda y: y.share_memory_(),
        lambda y: y.nonzero(),
        lambda y: torch.tensor_split(torch.zeros(9, device="cuda"), (y > 0).long()),
        lambda y: (y > 0).all().item(),
    ],
)
def test_unknown_values_on_the_host_are_not_read(read: Callable[[Tensor], Any]) -> None:
    with simulate("T4"):
        y = torch.rand(8, device="cuda").cpu()
        with pytest.raises((UnknownValueError, UnsupportedOperatorError, RuntimeError)):
            read(y)


def test_results_that_depend_on_shape_alone_are_known() -> None:
    with simulate("T4"):
        y = torch.rand(4, device="cuda").cpu()
        assert torch.zeros_like(y).tolist() == [0.0] * 4
        assert torch.ones_like(y.cuda(), device="cpu").tolist() == [1.0] * 4
        assert y.new_full((2,), 7.0).tolist() == [7.0, 7.0]
        assert copy.deepcopy(y).shape == y.shape


def test_a_scalar_tensor_of_the_host_combines_with_gpu_tensors() -> None:
    with simulate("T4"):
        x = torch.rand(4, device="cuda")
        assert (x * x.sum().cpu()).is_cuda
        with pytest.raises(UnknownValueError):
            x.zero_().add_(x.exp().cpu().sum() * torch.rand((), device="cuda").cpu()).tolist()


def test_running_statistics_become_unknown_with_an_unknown_input() -> None:
    with simulate("T4"):
        mean, scale = torch.zeros(4), torch.ones(4)
        F.batch_norm(torch.rand(8, 4, device="cuda").cpu(), mean, scale, training=True)
        with pytest.raises(UnknownValueError):
            mean.tolist()


def test_after_the_simulation_unknown_values_are_nan_or_int_min() -> None:
    with simulate("T4"):
        small = torch.rand(8, device="cuda").cpu()
        large = torch.rand(100_000, device="cuda").cpu()
        counts = torch.randint(9, (8,), device="cuda").cpu()
    assert small.isnan().all()
    assert large.sum().isnan()
    assert set(counts.tolist()) == {torch.iinfo(torch.int64).min}
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        large.numpy()
