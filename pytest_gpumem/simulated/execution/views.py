"""Operators that return views of their arguments: nothing is allocated, but of sparse ones."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.execution.composites import followed, of_parts
from pytest_gpumem.simulated.execution.runner import CUDA, Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators import sparse_products
from pytest_gpumem.simulated.operators.sparse import is_sparse


def makes_views(func: Any) -> bool:
    """Return whether ``func`` returns views, and no target that it has written to."""
    aliases = [one.alias_info for one in func._schema.returns]
    writes = [alias is not None and alias.is_write for alias in aliases]
    return any(alias is not None for alias in aliases) and not all(writes)


def views(runner: Runner, func: Any) -> Handler:
    """Run torch's own kernel, and nothing else."""
    run = runner.run
    machine = runner.machine

    def viewed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if machine.has_real_meta:
            runner.owner(args, kwargs)  # numbers that C++ makes next are of the same device
        return run(func, args, kwargs)

    parts = sparse_products.TRANSPOSES.get(str(func))
    if parts is None:
        return followed(runner, viewed)
    copied = of_parts(runner, parts)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_sparse(args[0]) and runner.owner(args, kwargs) == CUDA:
            return copied(args, kwargs)
        return viewed(args, kwargs)

    return followed(runner, handle)
