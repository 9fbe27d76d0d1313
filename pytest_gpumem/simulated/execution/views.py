"""Operators that return views of their arguments: nothing is allocated."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.execution.composites import followed
from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.machine.dispatch import Handler


def makes_views(func: Any) -> bool:
    """Whether ``func`` returns views, and not what it has written to."""
    aliases = [one.alias_info for one in func._schema.returns]
    writes = [alias is not None and alias.is_write for alias in aliases]
    return any(alias is not None for alias in aliases) and not all(writes)


def views(runner: Runner, func: Any) -> Handler:
    """Run torch's own kernel, and nothing else."""
    run = runner.run
    return followed(runner, lambda args, kwargs: run(func, args, kwargs))
