"""Autograd accumulates in place, as it does on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

MATRIX = 64 * 64 * 4


def leaf() -> torch.Tensor:
    return torch.randn(64, 64, device="cuda", requires_grad=True)


def test_second_gradient_of_a_node_is_added_in_place(on: Any) -> None:
    gpu = on()
    weight, other = leaf(), torch.randn(64, 64, device="cuda")
    root = weight.exp()
    total = (root * other).sum() + (root * other).sum()
    events = gpu.of(total.backward)
    # ones_like, two products into the buffer, exp's gradient; no third matrix for their sum.
    assert [event for event in events if event > 0] == [4, MATRIX, MATRIX, MATRIX]


def test_a_gradient_with_other_references_is_not_overwritten(on: Any) -> None:
    gpu = on()
    weight = leaf()
    root = weight.exp()
    seen: list[torch.Tensor] = []
    first = root * 1.0
    first.register_hook(seen.append)
    total = first + root  # the same gradient goes both ways
    gradient = torch.ones(64, 64, device="cuda")
    events = gpu.of(lambda: total.backward(gradient))
    assert sum(event for event in events if event > 0) == 3 * MATRIX


def test_second_backward_adds_to_the_stored_gradient(on: Any) -> None:
    gpu = on()
    weight = leaf()
    (weight * 2).sum().backward()
    stored = weight.grad
    events = gpu.of((weight * 2).sum().backward)
    assert weight.grad is stored
    assert sum(events) == 0


def test_an_addition_in_a_custom_function_allocates(on: Any) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 + gradient * 3

    gpu = on()
    weight = leaf()
    result: torch.Tensor = Doubled.apply(weight)  # type: ignore[no-untyped-call]  # torch's
    gradient = torch.ones(64, 64, device="cuda")
    events = gpu.of(lambda: result.backward(gradient))
    assert [event for event in events if event > 0] == [MATRIX, MATRIX, MATRIX]


def test_maximum_scatters_into_one_zeroed_gradient(on: Any) -> None:
    gpu = on()
    weight = leaf()
    highest = weight.max(dim=-1).values
    gradient = torch.ones(64, device="cuda")
    events = gpu.of(lambda: highest.backward(gradient))
    assert [event for event in events if event > 0] == [MATRIX]


def test_gather_adds_into_one_zeroed_gradient(on: Any) -> None:
    gpu = on()
    weight = leaf()
    chosen = weight.gather(1, torch.zeros(64, 1, dtype=torch.long, device="cuda"))
    gradient = torch.ones(64, 1, device="cuda")
    events = gpu.of(lambda: chosen.backward(gradient))
    assert [event for event in events if event > 0] == [MATRIX]


def test_cross_entropy_with_logits_works_on_one_gradient(on: Any) -> None:
    gpu = on()
    logits, target = leaf(), torch.rand(64, 64, device="cuda")
    loss = functional.binary_cross_entropy_with_logits(logits, target)
    events = gpu.of(loss.backward)
    assert [event for event in events if event > 0] == [4, MATRIX]


def has_gradient_in_the_origin() -> bool:
    y = torch.zeros((), requires_grad=True)
    torch.atan2(y, torch.zeros(())).backward()
    assert y.grad is not None
    return not bool(y.grad.isnan())


def test_backward_of_atan2_fills_one_reciprocal(on: Any) -> None:
    gpu = on()
    y, x = leaf(), torch.randn(64, 64, device="cuda")
    angle = torch.atan2(y, x)
    gradient = torch.ones(64, 64, device="cuda")
    events = gpu.of(lambda: angle.backward(gradient))
    # Two squares, their sum, its reciprocal; x times it, times the gradient. Since the gradient in
    # the origin is zero, a mask fills the reciprocal there.
    masks = [MATRIX // 4] if has_gradient_in_the_origin() else []
    assert [event for event in events if event > 0] == [*[MATRIX] * 4, *masks, *[MATRIX] * 2]


def test_gradient_of_a_target_is_scaled_in_place(on: Any) -> None:
    gpu = on()
    probabilities, target = torch.rand(64, 64, device="cuda"), leaf()
    loss = functional.binary_cross_entropy(probabilities, target, reduction="sum")
    events = gpu.of(loss.backward)
    # The loss's own; logit of the probabilities, negated and multiplied in place.
    assert [event for event in events if event > 0] == [4, MATRIX]


def test_backward_of_cumprod_assumes_no_zeros(on: Any) -> None:
    gpu = on()
    weight = leaf()
    product = weight.cumprod(0)
    gradient = torch.ones(64, 64, device="cuda")
    events = gpu.of(lambda: product.backward(gradient))
    allocated = [event for event in events if event > 0]
    # Weighted, flipped, summed, flipped back, divided; a mask of the zeros.
    assert allocated.count(MATRIX) == 5
    assert allocated.count(MATRIX // 4) == 1


def test_backward_of_cumprod_knows_no_zeros_where_it_is_traced(on: Any) -> None:
    """Tensor subclasses get the formula for any input, which counts the zeros: int64."""
    gpu = on()
    product = torch.compile(lambda x: x.cumprod(1))(leaf())
    gradient = torch.ones(64, 64, device="cuda")
    assert 2 * MATRIX in gpu.of(lambda: product.backward(gradient))


def test_gradients_with_a_graph_are_added_out_of_place(on: Any) -> None:
    gpu = on()
    weight, other = leaf(), torch.randn(64, 64, device="cuda")
    root = weight.exp()
    total = (root * other).sum() + (root * other).sum()
    events = gpu.of(lambda: torch.autograd.grad(total, weight, create_graph=True))
    # As without a graph (above), and a third matrix for the sum of the two products.
    assert [event for event in events if event > 0] == [4, *[MATRIX] * 4]


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x.gather(0, torch.zeros(8, 64, dtype=torch.long, device="cuda")),
        lambda x: x[torch.zeros(8, dtype=torch.long, device="cuda")],
        lambda x: x.sort(-1).values[:8],
        lambda x: x.cummax(0).values,
        lambda x: x.index_select(0, torch.zeros(8, dtype=torch.long, device="cuda")),
    ],
    ids=["gather", "index", "sort", "cummax", "index_select"],
)
def test_formulas_write_in_place_where_their_graph_is_kept(on: Any, select: Any) -> None:
    gpu = on()
    weight = leaf()
    selected = select(weight)
    gradient = torch.ones_like(selected)
    plain = gpu.of(lambda: torch.autograd.grad(selected, weight, gradient, retain_graph=True))
    graph = gpu.of(lambda: torch.autograd.grad(selected, weight, gradient, create_graph=True))
    assert graph.count(MATRIX) == plain.count(MATRIX)


def test_gradients_of_logits_have_gradients(on: Any) -> None:
    on()
    weight, target = leaf(), torch.rand(64, 64, device="cuda")
    loss = functional.binary_cross_entropy_with_logits(weight, target, target)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.square().sum().backward()
    assert weight.grad is not None


def test_a_dense_gradient_and_the_sparse_one_of_a_leaf_make_a_new_one(on: Any) -> None:
    gpu = on()
    table = leaf()
    tokens = torch.zeros(8, dtype=torch.long, device="cuda")
    functional.embedding(tokens, table, sparse=True).sum().backward()
    events = gpu.of((table * 2).sum().backward)
    # accumulate_grad.h: new_grad + variable_grad
    assert [event for event in events if abs(event) == MATRIX] == [MATRIX, MATRIX, -MATRIX]


def test_an_index_in_a_custom_function_is_checked(on: Any) -> None:
    class Placed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            rows = torch.zeros(8, dtype=torch.long, device="cuda")
            return gradient.index_put((rows,), gradient[:8], accumulate=True)

    gpu = on()
    placed = Placed.apply(leaf())  # type: ignore[no-untyped-call]  # torch's
    gradient = torch.ones(64, 64, device="cuda")
    events = gpu.of(lambda: placed.backward(gradient))
    assert events.count(8) == 2  # the least and the largest index


def test_a_retained_graph_can_be_used_again(on: Any) -> None:
    gpu = on()
    weight = leaf()
    total = weight.exp().sum()
    first = gpu.of(lambda: total.backward(retain_graph=True))
    second = gpu.of(lambda: total.backward())
    # The first gradient becomes the parameter's; the second one is added to it and dropped, and
    # what exp() returned goes with the graph.
    assert sum(first) == MATRIX
    assert sum(second) == -MATRIX


def test_nothing_is_saved_without_gradients(on: Any) -> None:
    gpu = on()
    weight = leaf()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert sum(gpu.of(lambda: weight.exp().sin())) == MATRIX
    assert sum(gpu.of(lambda: weight.exp().sin())) == 2 * MATRIX


@pytest.mark.parametrize(
    "select",
    [
        lambda table: table[torch.zeros(8, dtype=torch.long, device="cuda")],
        lambda table: table.gather(0, torch.zeros(8, 64, dtype=torch.long, device="cuda")),
    ],
)
def test_formulas_write_in_place_under_autocast(on: Any, select: Any) -> None:
    gpu = on()
    table = torch.ones(1000, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        events = gpu.of(select(table).sum().backward)
    # index_put_ and scatter_add_ fill the zeros that become the gradient: 1000 x 64 x 4 bytes.
    assert events.count(256_000) == 1
    assert -256_000 not in events


def test_renorm_sums_in_the_accumulation_type_of_cuda(on: Any) -> None:
    # renorm_backward asks for the type that sums have on the device: float64 on meta tensors.
    gpu = on()
    x = torch.randn(8, 128, device="cuda", requires_grad=True)
    y = x.renorm(2, 0, 1.0)
    gradient = torch.ones_like(y)
    sizes = {abs(event) for event in gpu.of(lambda: y.backward(gradient))}
    assert sizes == {8 * 128 * 4, 8 * 4, 8}  # the matrix, a number and a flag for each row
    x = torch.zeros(8, 128, dtype=torch.complex64, device="cuda", requires_grad=True)
    y = x.renorm(2, 0, 1.0)
    gradient = torch.ones_like(y)
    sizes = {abs(event) for event in gpu.of(lambda: y.backward(gradient))}
    assert sizes == {8 * 128 * 8, 8 * 4, 8}  # numbers of rows are real


def test_backward_of_mvlgamma_allocates_its_sum(on: Any) -> None:
    gpu = on()
    x = torch.full((), 5.0, device="cuda", requires_grad=True)
    y = torch.mvlgamma(x, 1)
    gradient = torch.ones_like(y)
    # arange, its sum with the input, digamma in place; that summed, and multiplied.
    assert gpu.of(lambda: y.backward(gradient)) == [4, 4, -4, 4, 4, -4, -4]
