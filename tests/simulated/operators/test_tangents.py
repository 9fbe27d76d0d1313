"""Tangents of forward mode, as on the dry device with torch 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")


def tangent(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return the tangent of ``call`` for tangents of ones."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, torch.ones_like(one)) for one in given]
        made: Tensor = forward_ad.unpack_dual(call(*duals)).tangent
        return made


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


@pytest.mark.parametrize("shape", [(30,), (5, 30), (4, 5, 30), (2, 2, 5, 30)])
@pytest.mark.parametrize("kept", ["xwb", "b", "w", "x"])
def test_a_linear_layer_adds_no_tangent_in_place(
    on: Any, shape: tuple[int, ...], kept: str
) -> None:
    on()
    given = {"x": numbers(*shape), "w": numbers(20, 30), "b": numbers(20)}

    def call(*duals: Tensor) -> Tensor:
        named = {**given, **dict(zip(kept, duals, strict=True))}
        return F.linear(named["x"], named["w"], named["b"])

    assert tangent(call, *(given[name] for name in kept)).shape == (*shape[:-1], 20)


def test_a_softmax_multiplies_its_tangent_in_place(on: Any) -> None:
    gpu = on()
    x = numbers(4, 300)
    alone = gpu.of(lambda: tangent(lambda one: F.softmax(one, -1), x))
    assert alone[:13] == [
        4800, 4800, 16, 4800, 4800, -4800, -16, 16, 16, -16, -4800, 4800, 4800,
    ]  # fmt: skip
    x.requires_grad_()
    recorded = gpu.of(lambda: tangent(lambda one: F.softmax(one, -1), x))
    assert recorded.count(4800) == alone.count(4800) + 1  # autograd keeps a copy
    x.detach_()
    of_functions = gpu.of(lambda: torch.func.jvp(lambda one: F.softmax(one, -1), (x,), (x,)))
    assert of_functions.count(4800) == alone.count(4800)  # none of ones, and a product more


def test_gated_units_and_values_of_matrices_have_tangents(on: Any) -> None:
    on()
    assert tangent(F.glu, numbers(5, 30)).shape == (5, 15)
    assert tangent(torch.linalg.svdvals, numbers(5, 30)).shape == (5,)
    assert tangent(torch.linalg.eigvalsh, numbers(5, 5)).shape == (5,)


@pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")
@pytest.mark.parametrize("interpolation", ["linear", "midpoint"])
def test_a_quantile_has_a_tangent_by_any_interpolation(on: Any, interpolation: str) -> None:
    """A tangent that failed left autograd off: later ones, and gradients, failed, too."""
    on()
    x = numbers(32, 64)
    for _ in range(2):
        made = tangent(lambda one: torch.quantile(one, 0.3, dim=0, interpolation=interpolation), x)
        assert made.shape == (64,)
    assert (x.requires_grad_() * 2).requires_grad
