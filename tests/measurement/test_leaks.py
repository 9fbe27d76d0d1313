"""Held and leaked memory; the blocks are those of tensors on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem.measurement.leaks import (
    blocks_reachable,
    holders_of_class,
    leaked_blocks,
    reachable_objects,
)
from pytest_gpumem.measurement.statistics import Block

GLOBAL = torch.ones(3)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        return self.tensor


def block_of(tensor: torch.Tensor) -> Block:
    return Block(0, tensor.data_ptr(), tensor.nbytes)


def holds(root: Any, tensor: torch.Tensor) -> bool:
    block = block_of(tensor)
    return blocks_reachable([root], frozenset({block, Block(0, 1, 1)})) == {block}


def test_only_new_blocks_without_a_holder_leak() -> None:
    old, held, lost = torch.ones(4), torch.ones(5), torch.ones(6)
    after = frozenset(map(block_of, (old, held, lost)))

    leaked = leaked_blocks(frozenset({block_of(old)}), after, [[held]])

    assert leaked == {block_of(lost)}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: {"a": [(tensor,)]},
        lambda tensor: SimpleNamespace(inner=SimpleNamespace(tensor=tensor)),
        lambda tensor: lambda: tensor,
        lambda tensor: lambda x=tensor: x,
        lambda tensor: Holder(tensor).get,
        lambda tensor: nn.ParameterList([nn.Parameter(tensor)]),
        lambda tensor: tensor[2:],
        lambda tensor: tensor.view(2, 4).t(),
    ],
    ids=[
        "itself",
        "containers",
        "attributes",
        "closure",
        "default",
        "bound method",
        "module",
        "slice",
        "view",
    ],
)
def test_a_tensor_is_held_by_objects_that_lead_to_it(wrap: Any) -> None:
    tensor = torch.ones(8)
    assert holds(wrap(tensor), tensor)


def test_a_model_holds_its_gradients_and_an_optimizer_its_state() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    assert model.weight.grad is not None
    assert holds(model, model.weight.grad)
    assert holds(optimizer, optimizer.state[model.weight]["exp_avg"])


def test_a_loss_holds_the_tensors_that_its_graph_saved() -> None:
    x = torch.ones(8, requires_grad=True)
    saved = x.detach() * 2
    loss = (x * saved).sum()

    assert holds(loss, saved)
    assert holds(loss, x)
    loss.backward()
    assert not holds(loss, saved)


def test_a_lazy_module_holds_nothing_before_it_has_a_shape() -> None:
    assert not holds(nn.LazyLinear(4), torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_holds_its_values() -> None:
    values = torch.ones(2)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=True)

    assert holds(sparse, sparse._values())


def test_globals_types_and_pytest_s_own_objects_hold_nothing(
    request: pytest.FixtureRequest,
) -> None:
    class HasTensor:
        tensor = GLOBAL

    def function() -> torch.Tensor:
        return GLOBAL

    assert not holds(HasTensor(), GLOBAL)
    assert not holds(function, GLOBAL)
    assert not holds(request, GLOBAL)
    assert not holds(torch, GLOBAL)


def test_classes_hold_models_optimizers_and_tensors_but_no_containers() -> None:
    class Base:
        weight = torch.ones(2)

    class Derived(Base):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache = [torch.ones(3)]  # noqa: RUF012 - what a leak looks like

    holders = holders_of_class(Derived)

    assert {type(holder) for holder in holders} == {nn.Linear, torch.optim.SGD, torch.Tensor}


def test_a_cycle_of_references_is_walked_once() -> None:
    cycle: list[Any] = [torch.ones(2)]
    cycle.append(cycle)

    assert sum(found is cycle for found in reachable_objects([cycle])) == 1
