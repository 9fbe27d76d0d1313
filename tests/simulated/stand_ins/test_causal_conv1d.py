"""causal-conv1d: what csrc/causal_conv1d.cpp and cpp_functions.py of 1.7.0 allocate."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.imports import served

BATCH, DIM, LENGTH, WIDTH = 2, 64, 512, 4
ROWS = BATCH * DIM * LENGTH * 2
WEIGHT, BIAS = DIM * WIDTH, DIM
"""Elements; gradients are float32 first, and then of the parameter's dtype."""


@pytest.fixture
def gpu(on: Any) -> Iterator[Any]:
    watched = on("A100-40GB")
    with served(("causal-conv1d",), lambda sentence: None):
        yield watched


@pytest.fixture
def conv(gpu: Any) -> Any:
    return importlib.import_module("causal_conv1d")


def made(*shape: int, grad: bool = True) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def gradients(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


def test_it_allocates_its_output_and_gradients_summed_in_float32(gpu: Any, conv: Any) -> None:
    x, weight, bias = made(BATCH, DIM, LENGTH), made(DIM, WIDTH), made(DIM)
    out = conv.causal_conv1d_fn(x, weight, bias, activation="silu")
    assert gpu.of(lambda: conv.causal_conv1d_fn(x, weight, bias, activation="silu")) == [ROWS]
    assert gradients(gpu, out, x, weight, bias) == [
        *(ROWS, WEIGHT * 4, BIAS * 4),
        *(WEIGHT * 2, -WEIGHT * 4, BIAS * 2, -BIAS * 4),
    ]


def test_deterministic_gradients_are_summed_by_sequence(
    gpu: Any, conv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "1")
    x, weight = made(BATCH, DIM, LENGTH), made(DIM, WIDTH)
    out = conv.causal_conv1d_fn(x, weight)
    assert BATCH * WEIGHT * 4 in gradients(gpu, out, x, weight)
    # Channels last: also by chunk of 128.
    by_channel = made(BATCH, LENGTH, DIM).transpose(1, 2)
    out = conv.causal_conv1d_fn(by_channel, weight)
    assert BATCH * 4 * WEIGHT * 4 in gradients(gpu, out, by_channel, weight)


def test_final_states_are_a_tensor_of_their_own(gpu: Any, conv: Any) -> None:
    x, weight = made(BATCH, LENGTH, DIM, grad=False).transpose(1, 2), made(DIM, WIDTH)
    gpu.events()
    out, states = conv.causal_conv1d_fn(x, weight, return_final_states=True)
    assert gpu.events() == [BATCH * DIM * (WIDTH - 1) * 2, ROWS]
    assert states.shape == (BATCH, DIM, WIDTH - 1)
    assert out.stride() == x.stride()


def test_an_update_writes_its_state_in_place(gpu: Any, conv: Any) -> None:
    state, weight = made(BATCH, DIM, WIDTH, grad=False), made(DIM, WIDTH, grad=False)
    x = made(BATCH, DIM, grad=False)
    assert gpu.of(lambda: conv.causal_conv1d_update(x, state, weight)) == [BATCH * DIM * 2]
    assert conv.causal_conv1d_update(x, state, weight).shape == x.shape


def test_a_width_that_no_kernel_has_is_refused(gpu: Any, conv: Any) -> None:
    with pytest.raises(RuntimeError, match="only supports width between 2 and 4"):
        conv.causal_conv1d_fn(made(BATCH, DIM, LENGTH), made(DIM, 5))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_where_values_are_computed_they_are_those_of_torchs_convolution(
    activation: str | None,
) -> None:
    with simulate(real_values=True), served(("causal-conv1d",), lambda sentence: None):
        conv = importlib.import_module("causal_conv1d")
        x, weight, bias = (
            torch.randn(shape, device="cuda", requires_grad=True)
            for shape in ((2, 8, 9), (8, 4), 8)
        )
        out = conv.causal_conv1d_fn(x, weight, bias, activation=activation)
        found = torch.autograd.grad(out.square().sum(), (x, weight, bias))
        host = [each.detach().cpu().requires_grad_() for each in (x, weight, bias)]
        padded = torch.nn.functional.pad(host[0], (3, 0))
        expected = torch.nn.functional.conv1d(padded, host[1][:, None], host[2], groups=8)
        if activation is not None:
            expected = torch.nn.functional.silu(expected)
        torch.testing.assert_close(out.cpu(), expected)
        reference = torch.autograd.grad(expected.square().sum(), host)
        for one, other in zip(found, reference, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_it_is_there_only_where_it_is_named() -> None:
    if importlib.util.find_spec("causal_conv1d") is not None:
        pytest.skip("causal-conv1d is installed")
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("causal_conv1d")
    with SimulatedGPU("T4", stand_ins=("causal-conv1d",)).active():
        assert importlib.metadata.version("causal_conv1d") == "1.7.0"
