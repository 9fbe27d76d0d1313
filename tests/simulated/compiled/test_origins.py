"""Attribution of compiled code's memory to operators of its graph and to the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate

MIB = 1024 * 1024

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function, untyped."""
    result: Callable[..., Any] = torch.compile(function, **options)
    return result


def taken(gpu: Any, since: int) -> dict[int, tuple[str, tuple[str, int, str]]]:
    """Return, by size, operator and line of the allocations since event ``since``."""
    events = [event for event in gpu.trace[since:] if event.action == "alloc"]
    return {each.size: (each.context.operator_name, each.context.source_line) for each in events}


def test_buffers_name_the_line_and_the_operators_that_they_fuse() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(256, 1024, device="cuda")
        before = len(gpu.trace)

        def gated(x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid() * x.tanh()

        y = compiled(gated)(x)
        (event,) = [event for event in gpu.trace[before:] if event.action == "alloc"]
        del y
    line = gated.__code__.co_firstlineno + 1
    assert event.context.source_line == (__file__, line, "gated")
    assert event.context.operator_name == "torch.sigmoid + torch.tanh + torch.mul, fused"


def test_results_of_a_library_call_name_its_operator_alone() -> None:
    """The gradients of a convolution whose result is normalized."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = nn.functional.conv2d(x, weight, padding=1)
        return nn.functional.batch_norm(y, None, None, training=True).relu()

    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(8, 16, 64, 64, device="cuda", requires_grad=True)
        weight = torch.ones(32, 16, 3, 3, device="cuda", requires_grad=True)
        y = compiled(run)(x, weight)
        before = len(gpu.trace)
        y.backward(torch.ones_like(y))
        found = taken(gpu, before)
    line = run.__code__.co_firstlineno + 1
    for gradient in (2 * MIB, 32 * 16 * 9 * 4):
        assert found[gradient] == ("aten::convolution_backward", (__file__, line, "run"))


def test_torchs_layers_have_the_line_of_the_users_call() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        layers = nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Linear(1024, 128))
        model, x = compiled(layers.cuda()), torch.ones(4096, 512, device="cuda")
        before = len(gpu.trace)
        loss = model(x).sum()
        forward = taken(gpu, before)
        before = len(gpu.trace)
        loss.backward()
        backward = taken(gpu, before)
    name = "test_torchs_layers_have_the_line_of_the_users_call"
    line = test_torchs_layers_have_the_line_of_the_users_call.__code__
    called = (__file__, line.co_firstlineno + 5, name)
    assert forward[2 * MIB] == ("torch.addmm", called)
    assert forward[16 * 1024] == ("torch.native_layer_norm", called)  # means and deviations
    assert backward[512 * 1024] == ("torch.mm", (__file__, called[1] + 3, name))


def test_workspaces_and_copies_are_attributed_to_their_kernel() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, weight).relu()

    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(8, 16, 64, 64, device="cuda").to(memory_format=torch.channels_last)
        weight = torch.ones(32, 16, 3, 3, device="cuda", requires_grad=True)
        before = len(gpu.trace)
        compiled(run)(x, weight)
        # The weight in channels last, which is what cuDNN reads.
        copied = taken(gpu, before)[32 * 16 * 9 * 4]
    assert copied == ("torch.convolution", (__file__, run.__code__.co_firstlineno + 1, "run"))

    with simulate("A100-40GB", compile="always") as gpu:
        norm, x = nn.LayerNorm(1024).cuda(), torch.ones(8192, 1024, device="cuda")
        normed = compiled(lambda x: norm(x).sin())(x.requires_grad_())
        before = len(gpu.trace)
        normed.backward(torch.ones_like(normed))
        # Sums of 1024 columns, twice, over parts of the rows.
        (names,) = {name for size, (name, _) in taken(gpu, before).items() if size == 4 * MIB}
    assert "aten::native_layer_norm_backward" in names


def test_an_out_of_memory_error_ends_the_attribution() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(1 << 30, 2, device="cuda")  # 8 GiB of 40
        # The operator of a kernel with memory of its own is named before it allocates.
        twice = compiled(lambda x: torch.cat([x.sort(0)[0]] * 5))
        with pytest.raises(torch.OutOfMemoryError):
            twice(x)
        before = len(gpu.trace)
        torch.zeros(3, device="cuda")
        (event,) = [event for event in gpu.trace[before:] if event.action == "alloc"]
    assert event.context.operator_name == "torch.zeros"
