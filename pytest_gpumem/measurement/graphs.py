"""The tensors that autograd's graphs keep, read without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pytest_gpumem.measurement.leaks import graph_of

MOST_NODES = 20_000
"""The most nodes that are visited: a step of a large model has some thousands."""

_RAW = "_raw_saved_"
"""Prefix of the attributes of a node that give a saved tensor as it is packed
(tools/autograd/gen_autograd_functions.py)."""


def saved_by_graphs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that the graphs of ``tensors`` keep for backward.

    Saved tensors are read as they are packed: unpacking runs hooks, which under checkpointing
    compute a module again. What a hook has packed is left out, what backward has freed is not
    there. Releases that do not show packed tensors yield nothing: 2.6 does not, 2.11 does.
    """
    queue = [node for tensor in tensors if (node := graph_of(tensor)) is not None]
    seen: set[Any] = set()
    names: dict[type, list[str]] = {}
    while queue and len(seen) < MOST_NODES:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        queue.extend(function for function, _ in node.next_functions if function is not None)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith(_RAW)]
        for name in names[kind]:
            try:
                saved = getattr(node, name)
            except RuntimeError:  # a Python function whose tensors backward has freed
                continue
            yield from _packed(saved)


def _packed(saved: Any) -> Iterator[torch.Tensor]:
    if isinstance(saved, (list, tuple)):
        for one in saved:
            yield from _packed(one)
        return
    data = getattr(saved, "data", None)
    if isinstance(data, torch.Tensor):
        yield data
