"""Sequence numbers of autograd's nodes: with a GPU each thread has its own counter."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine import machine
from pytest_gpumem.simulated.machine.machine import Numbering


class Counter:
    """A counter of the one thread that makes nodes in the program and in backward passes."""

    def __init__(self, value: int) -> None:
        self.value = value

    def make(self, nodes: int) -> int:
        """Count ``nodes`` and return the number of the first."""
        first, self.value = self.value, self.value + nodes
        return first

    def __call__(self) -> int:
        return self.value


def test_nodes_of_a_pass_have_numbers_of_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a GPU the program's thread makes nodes 0 to 3, the GPU's 0 to 2; then they make node 4 and
    # nodes 3 to 6. The one thread here had counted to 100 before.
    counter = Counter(100)
    monkeypatch.setattr(machine, "_next", counter)
    numbers = Numbering()
    assert counter.make(4) == 100
    began = counter.make(3)
    number = numbers.ended(began)
    assert [number(began + at) for at in range(3)] == [100, 101, 102]
    assert counter.make(1) == 107  # node 4 of the program
    began = counter.make(4)
    number = numbers.ended(began)
    # Node 3 beside 3 of the program, 4 beside 4; 5 and 6 beside those that it makes next.
    assert [number(began + at) for at in range(4)] == [103, 107, 112, 113]
    assert counter.make(1) == 112


def test_nodes_of_a_gradient_run_after_those_of_the_program() -> None:
    with simulate("A100-40GB"):
        x = torch.ones(8, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        loss = slope.exp().sum()
        node = slope.grad_fn
        assert node is not None
        assert loss.grad_fn is not None
        # sin and sum are nodes 0 and 1; the pass made expand, cos and mul: 0, 1 and 2.
        first = x.sin().grad_fn._sequence_nr() - 2 - 2 - 3  # type: ignore[union-attr]  # less exp, sum
        assert node._sequence_nr() - first <= 2
        assert node._sequence_nr() < loss.grad_fn._sequence_nr()


def test_numbers_are_unchanged_without_create_graph() -> None:
    with simulate("A100-40GB"):
        x = torch.ones(8, device="cuda", requires_grad=True)
        y = x.exp()
        assert y.grad_fn is not None
        before = y.grad_fn._sequence_nr()
        y.sum().backward()
        assert y.grad_fn._sequence_nr() == before
