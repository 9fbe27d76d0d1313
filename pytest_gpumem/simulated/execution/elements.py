"""Operators of lists, run on one element of each kind: equal elements have equal results.

An optimizer hands all its parameters to one operator. For ``meta`` torch takes the slow route of
aten/src/ATen/native/ForeachOpsKernels.cpp, one element after the other, most of them by kernels in
Python; a model of many equal layers has few kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.simulated.execution.shapes import UnknownError, recipe, storages_in

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def run_by_kinds(run: Run, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of lists with ``run``; ``Shapes.find`` described its arguments as ``key``."""
    func, _, described, _ = key
    lists = [place for place, arg in enumerate(args) if isinstance(arg, (list, tuple))]
    kinds = _kinds(args, kwargs, lists, described)
    first: dict[Any, int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(kind, place)
    if len(first) == len(kinds):
        return run(func, args, kwargs)
    fewer = tuple(
        [arg[number] for number in first.values()] if place in lists else arg
        for place, arg in enumerate(args)
    )
    results = run(func, fewer, kwargs)
    if results is None:
        return None
    inputs = storages_in((fewer, kwargs))
    try:
        make = {
            kind: recipe(result, (), inputs) for kind, result in zip(first, results, strict=True)
        }
    except UnknownError:
        return run(func, args, kwargs)
    return [make[kind](()) for kind in kinds]


def _kinds(
    args: tuple[Any, ...], kwargs: dict[str, Any], lists: list[int], described: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Return each element's description in all lists; empty if an argument differs by element."""
    others = (*kwargs.values(), *(arg for place, arg in enumerate(args) if place not in lists))
    if (
        not lists
        or len({len(args[place]) for place in lists}) > 1  # torch refuses them
        or any(isinstance(other, (list, tuple)) for other in kwargs.values())
        or any(isinstance(other, torch.Tensor) and other.dim() for other in others)
    ):
        return []
    return list(zip(*(described[place] for place in lists), strict=True))
