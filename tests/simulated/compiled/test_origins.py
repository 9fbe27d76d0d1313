"""Whose the memory of compiled code is: the operators of its graph, and the user's line."""

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
    """``torch.compile``, which gives up its types."""
    result: Callable[..., Any] = torch.compile(function, **options)
    return result


def taken(gpu: Any, since: int) -> dict[int, tuple[str, tuple[str, int, str]]]:
    """By size, the operator and the line of what was allocated after so many events."""
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


def test_what_a_library_writes_names_its_operator_and_not_what_led_to_it() -> None:
    """The gradients of a convolution, whose own gradient has gone through a normalization."""

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


def test_layers_of_torch_s_own_have_their_operators_and_the_line_that_calls_them() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        layers = nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Linear(1024, 128))
        model, x = compiled(layers.cuda()), torch.ones(4096, 512, device="cuda")
        before = len(gpu.trace)
        loss = model(x).sum()
        forward = taken(gpu, before)
        before = len(gpu.trace)
        loss.backward()
        backward = taken(gpu, before)
    name = "test_layers_of_torch_s_own_have_their_operators_and_the_line_that_calls_them"
    line = test_layers_of_torch_s_own_have_their_operators_and_the_line_that_calls_them.__code__
    called = (__file__, line.co_firstlineno + 5, name)
    assert forward[2 * MIB] == ("torch.addmm", called)
    assert forward[16 * 1024] == ("torch.native_layer_norm", called)  # means and deviations
    assert backward[512 * 1024] == ("torch.mm", (__file__, called[1] + 3, name))


def test_a_workspace_and_a_copy_for_a_library_are_of_the_kernel_that_they_are_for() -> None:
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


def test_what_is_allocated_after_memory_ran_out_is_the_code_s_own() -> None:
    with simulate("A100-40GB", compile="always") as gpu:
        x = torch.ones(1 << 30, 2, device="cuda")  # 8 GiB of 40
        # A product has memory of its own kind: the operator that takes it is said before.
        twice = compiled(lambda x: torch.cat([x.sort(0)[0]] * 5))
        with pytest.raises(torch.OutOfMemoryError):
            twice(x)
        before = len(gpu.trace)
        torch.zeros(3, device="cuda")
        (event,) = [event for event in gpu.trace[before:] if event.action == "alloc"]
    assert event.context.operator_name == "torch.zeros"
