"""Sequence numbers of autograd's nodes, which decide the order of a backward pass.

Each thread numbers the nodes that it makes, from 0 (``at::sequence_number::get_and_increment`` of
aten/src/ATen/SequenceNumber.cpp, a ``thread_local``), and the engine runs the ready node with the
highest number first (``CompareNodeTaskTime`` of torch/csrc/autograd/engine.h), torch 2.6 to 2.15.
Nodes that ``create_graph=True`` adds are made by the thread of their GPU, which has numbered
nothing else, and therefore have lower numbers than those of the program's own thread. Backward of
``meta`` tensors runs on the thread that called it, so its nodes get their numbers anew afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch

OF_LEAVES = 2**64 - 1
"""The number of the nodes that accumulate gradients into leaves."""

_next: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Numbering:
    """Counts of autograd nodes made by the program's thread and by that of its GPU."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a test: neither thread has made a node."""
        self._starts = [0]
        """By pass: how many nodes the program's thread had made before."""
        self._shifts = [_next()]
        """By pass, and before the first: this thread's number of a node of the program's, less its
        number on a GPU."""
        self._on_gpu = 0

    def ended(self, began: int) -> Callable[[int], int]:
        """Count the nodes that a backward pass has made since number ``began``.

        Returns their numbers as if they had been made by the GPU's thread, as this thread
        counts: on a GPU both threads have a node of the same number, and so have they here.
        """
        before, made = self._on_gpu, _next() - began
        self._on_gpu += made
        self._starts.append(began - self._shifts[-1])
        self._shifts.append(self._shifts[-1] + made)

        def number(own: int) -> int:
            on_gpu = before + own - began
            return on_gpu + self._shifts[bisect_right(self._starts, on_gpu) - 1]

        return number


def renumber(results: Iterable[Any], began: int, number: Callable[[int], int]) -> None:
    """Give the nodes behind ``results`` that were made since ``began`` their ``number``."""
    waiting = [node for result in results if (node := getattr(result, "grad_fn", None)) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        own = node._sequence_nr()
        if own < began:  # older than the pass, and so is all that it leads to
            continue
        if own != OF_LEAVES:
            node._set_sequence_nr(number(own))
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        waiting += new


def leaves_of(outputs: Iterable[Any]) -> list[Any]:
    """Return the leaves that the graph of ``outputs`` leads to."""
    waiting = [node for output in outputs if (node := getattr(output, "grad_fn", None)) is not None]
    seen = set(waiting)
    leaves = []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        waiting += new
    return leaves
