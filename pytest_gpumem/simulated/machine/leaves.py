"""The stream on which autograd gives a leaf its gradient: the one that used it first.

The node of a leaf is made when an operator first uses it, and keeps the stream of that moment
(``Node::stream`` of torch/csrc/autograd/function.h). The graph shows which one it was: of the nodes
that lead to the leaf, the one with the lowest sequence number was made first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph

NO_SEQUENCE = 2**64 - 1
"""Sequence number of the nodes that accumulate gradients into leaves."""
_ENGINE_RUNS = torch.autograd.graph._engine_run_backward.__code__


class Leaves:
    """The leaves of the graph that runs backward on this thread."""

    def __init__(self) -> None:
        self._hooked: torch.Tensor | None = None
        self._task = -1
        self._first: dict[int, int] = {}
        """By leaf: the sequence number of the node that used it first."""

    @contextmanager
    def hooks_of(self, leaf: torch.Tensor | None) -> Iterator[None]:
        """Mark that a hook of ``leaf`` runs: autograd has no current node then."""
        before, self._hooked = self._hooked, leaf
        try:
            yield
        finally:
            self._hooked = before

    def first_use(self, task: int) -> int | None:
        """Return the number of the node that first used the present leaf; ``None`` if unknown."""
        leaf = self._hooked
        if leaf is None:
            leaf = getattr(torch._C._current_autograd_node(), "variable", None)
        if leaf is None:
            return None
        if task != self._task:
            self._task, self._first = task, _first_uses(_roots())
        return self._first.get(leaf._cdata)


def _roots() -> list[Any]:
    """Return the nodes at which the engine, which is somewhere below in the stack, has begun."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE_RUNS:
        frame = frame.f_back
    if frame is None:
        return []
    outputs = frame.f_locals["t_outputs"]
    return [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]


def _first_uses(roots: list[Any]) -> dict[int, int]:
    first: dict[int, int] = {}
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                first[leaf._cdata] = min(number, first.get(leaf._cdata, NO_SEQUENCE))
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return first
