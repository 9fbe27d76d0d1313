"""Activation checkpointing and saved-tensor hooks: tensors saved, recomputed and moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from pytest_gpumem import simulate

M = 64 * 64 * 4
"""A matrix."""


def leaf() -> Tensor:
    return torch.randn(64, 64, device="cuda", requires_grad=True)


def body(x: Tensor) -> Tensor:
    return x.exp().sin()


def matrices(events: list[int]) -> list[float]:
    return [event / M for event in events]


def forward_and_backward(gpu: Any, forward: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Return the events of both in matrices, without those of the incoming gradient."""
    x, gradient = leaf(), torch.ones(64, 64, device="cuda")
    made: list[Tensor] = []
    there = gpu.of(lambda: made.append(forward(x)))
    back = gpu.of(lambda: made[0].backward(gradient))
    return matrices(there), matrices(back)


def test_saved_tensors_without_checkpointing(on: Any) -> None:
    there, back = forward_and_backward(on(), body)
    assert there == [1, 1]  # exp, sin
    assert back == [1, 1, -1, 1, -1, -1]  # cos, times gradient; times exp's result


def test_a_reentrant_checkpoint_recomputes_all(on: Any) -> None:
    there, back = forward_and_backward(on(), lambda x: checkpoint(body, x, use_reentrant=True))
    assert there == [1, 1, -1]  # exp's result is dropped
    # exp and sin again, then as above; sin's result is held to the end.
    assert back == [1, 1, 1, 1, -1, 1, -1, -1, -1]


def test_a_non_reentrant_checkpoint_stops_early(on: Any) -> None:
    there, back = forward_and_backward(on(), lambda x: checkpoint(body, x, use_reentrant=False))
    assert there == [1, 1, -1]
    # exp again; sin is not run, as all that was saved is there.
    assert back == [1, 1, 1, -1, 1, -1, -1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_random_numbers_are_repeated_without_device_memory(on: Any, reentrant: bool) -> None:
    gpu = on()
    drop = nn.Dropout(0.5)
    there, _ = forward_and_backward(gpu, lambda x: checkpoint(drop, x, use_reentrant=reentrant))
    assert there == [0.25, 1, -0.25]  # the mask, one byte per element, is dropped


def test_selective_checkpointing_saves_selected_operators(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    weight = leaf()
    _ = weight @ weight  # the workspace of forward's thread
    select = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def forward(context: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(lambda x: body(x @ weight), x, use_reentrant=False, **context)

    everything, again = forward_and_backward(gpu, forward({}))
    selected, kept = forward_and_backward(gpu, forward({"context_fn": select}))
    assert (sum(everything), sum(selected)) == (1, 2)
    # Made again: the product and exp; with the product kept, exp alone.
    products_made_again = sum(e == 1 for e in again) - sum(e == 1 for e in kept)
    assert products_made_again == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_checkpointed_layers_peak_lower(autocast: bool, reentrant: bool) -> None:
    def peak(recomputes: bool) -> int:
        with simulate("A100-80GB", alloc_conf="expandable_segments:True") as gpu:
            layers = nn.Sequential(
                *[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
            ).cuda()
            x = torch.ones(4096, 512, device="cuda", requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                if recomputes:
                    y = checkpoint_sequential(layers, 8, x, use_reentrant=reentrant)
                else:
                    y = layers(x)
            y.sum().backward()
            gradients = [p.grad for p in layers.parameters()]
            assert all(g is not None and g.dtype == torch.float32 for g in gradients)
            return gpu.peak_allocated

    # Each of eight layers keeps what its linear part and its dropout returned, and a mask: 18 in
    # all. Recomputed, each keeps what it returned and one at a time keeps the rest: 8 + 1.25.
    activation = 4096 * 512 * (2 if autocast else 4)
    assert peak(False) - peak(True) > 7 * activation


# Saved tensors elsewhere.


@pytest.mark.parametrize("pinned", [True, False])
def test_tensors_saved_on_the_host_come_back_one_by_one(on: Any, pinned: bool) -> None:
    def forward(x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=pinned):
            return body(x)

    there, back = forward_and_backward(on(), forward)
    assert there == [1, 1, -1]
    # sin's input comes back, its cosine, times the gradient; exp's result comes back, times that.
    assert back == [1, 1, 1, -1, -1, 1, 1, -1, -1]


@pytest.mark.parametrize(("pinned", "copies"), [(True, [1, -1]), (False, [])])
def test_pinned_memory_is_contiguous(on: Any, pinned: bool, copies: list[int]) -> None:
    # packed.copy_(saved) of a transposed matrix first copies it on the device; saved.cpu() keeps
    # its strides and copies it as it is.
    def forward(x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=pinned):
            return x.t().exp()

    there, _ = forward_and_backward(on(), forward)
    assert there == [1, *copies]


def test_pack_hooks_change_the_saved_tensors(on: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()):
            return body(x)

    there, back = forward_and_backward(on(), forward)
    assert sum(there) == 1 + 2 * 0.5  # the result and exp's result in half precision, twice
    assert sum(back) == 1 - 2 * 0.5  # the gradient; both are gone


# Views, in-place operators, forward mode.


def test_views_share_and_in_place_operators_reuse(on: Any) -> None:
    gpu = on()
    x = torch.ones(64, 64, device="cuda")
    assert gpu.of(lambda: x.view(-1)[3:].t().expand(2, -1).detach()) == []
    assert gpu.of(lambda: x.add_(1).mul_(2).relu_().clamp_(0, 1)) == []
    assert gpu.of(lambda: x[0].fill_(1)) == []
    assert gpu.of(lambda: x.t().contiguous()) == [M]


def test_an_in_place_operator_keeps_tensors_for_backward(on: Any) -> None:
    gpu = on()
    x = leaf()
    # relu_ overwrites and keeps its own result; exp would need what it overwrites.
    assert gpu.of(lambda: (x * 2).relu_()) == [M]
    y = x.exp()
    y.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.fixture
def _active() -> Iterator[None]:
    context: AbstractContextManager[Any] = simulate("A100-40GB")
    with context:
        yield


@pytest.mark.usefixtures("_active")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_forward_mode_and_functional_transforms_run() -> None:
    layer = nn.Linear(8, 8).cuda()
    x = torch.ones(4, 8, device="cuda")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(layer(dual)).tangent
    assert tangent is not None
    assert tangent.shape == (4, 8)
    assert torch.func.vmap(layer)(x).shape == (4, 8)
    assert torch.func.grad(lambda x: layer(x).sum())(x).shape == (4, 8)
