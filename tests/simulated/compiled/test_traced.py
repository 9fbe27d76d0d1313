"""Traces of tensor subclasses, control flow and backward passes on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError
from tests.simulated.compiled.test_compile import MIB, allocated, compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Scaled(Tensor):
    """A tensor subclass of an 8-bit weight and its scale, as in libraries for quantisation."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=scale.dtype, device=data.device, requires_grad=False
        )

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.held = data
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, *__: Any) -> Scaled:
        return Scaled(inner["held"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            same = Scaled(args[0].held, args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, same)
        plain = tree_map_only(
            Scaled, lambda each: each.held.to(each.scale.dtype) * each.scale, args
        )
        return func(*plain, **(kwargs or {}))


def test_a_subclass_weight_is_dequantised_inside_of_the_graph() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        layer = nn.Linear(1024, 1024, bias=False, device="cuda")
        held = torch.ones(1024, 1024, dtype=torch.int8, device="cuda")
        scale = torch.ones(1024, 1, dtype=torch.bfloat16, device="cuda")
        layer.weight = nn.Parameter(Scaled(held, scale), requires_grad=False)
        x = torch.ones(512, 1024, dtype=torch.bfloat16, device="cuda")
        run = compiled(layer)
        before = len(gpu.trace)
        y = run(x)
        assert (y.device, y.dtype) == (x.device, torch.bfloat16)
        # The weight in 16 bits, in one kernel, and the result; cuBLAS's workspace beside them.
        assert sorted(allocated(gpu, before))[:2] == [MIB, 2 * MIB]


def test_jagged_tensors_take_the_memory_of_their_values() -> None:
    """Three rows of 10, 20 and 30 times 64 numbers are 15,360 bytes."""
    with simulate("A100-40GB", compile="always") as gpu:
        rows = [torch.ones(length, 64) for length in (10, 20, 30)]
        jagged = torch.nested.nested_tensor(
            rows, layout=torch.jagged, device="cuda", requires_grad=True
        )
        run = compiled(lambda nested: nested.sin() * nested.cos())
        before = len(gpu.trace)
        y = run(jagged)
        assert y.is_nested
        assert (y.device, y.values().shape) == (jagged.device, (60, 64))
        assert allocated(gpu, before) == [15_360]
        y.values().sum().backward()
        assert jagged.grad is not None


def test_compiled_autograd_is_refused_and_names_the_dry_device() -> None:
    with simulate("A100-40GB"):
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)
        loss = (x.sin().cos() + 1).exp().sum()
        sentence = "compiles a backward pass .*run pytest --gpumem-device=dry"
        with (
            compiled_autograd._enable(compiled),
            pytest.raises(UnsupportedOperatorError, match=sentence),
        ):
            loss.backward()


def test_gradients_of_control_flow_operators_are_traced() -> None:
    with simulate("A100-40GB"):
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)
        _, y = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))
        y.sum().backward()
        assert x.grad is not None
        assert (x.grad.device, x.grad.shape) == (x.device, x.shape)
        assert torch.ones(1, device="cuda").is_cuda


Body = Callable[[Tensor, Tensor], Tensor]

ZERO = torch.tensor(0)


@pytest.mark.parametrize("how", ["auto", "eager", "always"])
@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x + w, (x,)),
        lambda x, w: torch.cond(x.sum() > 0, lambda x: {1: x * w}, lambda x: {1: x + w}, (x,))[1],
        lambda x, w: while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x * w), (ZERO, x))[1],
        lambda x, w: scan(lambda held, x: (held * x, held + x * w), x[0], x, dim=0)[1],
    ],
    ids=["cond", "a dictionary", "while_loop", "scan"],
)
def test_branches_and_loops_have_gradients_for_captured_tensors(body: Body, how: str) -> None:
    with simulate("A100-40GB", compile=how) as gpu:
        x = torch.ones(3, 4, device="cuda", requires_grad=True)
        w = torch.ones(4, device="cuda", requires_grad=True)
        body(x, w).sum().backward()
        for each in (x, w):
            assert each.grad is not None
            assert (each.grad.device, each.grad.shape) == (each.device, each.shape)
        assert gpu.notes == ()


def test_a_scan_runs_eagerly_step_by_step() -> None:
    with simulate("A100-40GB") as gpu:
        x = torch.ones(4, 256, 1024, device="cuda")  # 4 MiB
        held, sums = scan(lambda held, x: ((held * x), held + x), x[0], x, dim=0)
        assert (held.shape, sums.shape) == (x.shape[1:], x.shape)
        assert gpu.allocated == (4 + 1 + 4) * MIB


def test_scaled_products_write_into_a_buffer_of_the_wrapper() -> None:
    with simulate("H100", compile="always") as gpu:
        a = torch.ones(1024, 1024, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        run = compiled(lambda a: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16))
        before = len(gpu.trace)
        assert run(a).dtype is torch.bfloat16
        assert allocated(gpu, before)[0] == 2 * MIB
