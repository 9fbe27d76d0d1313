"""Compiled code that cannot be followed: it runs eagerly and says so, or is refused."""

from __future__ import annotations

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def not_followed(machine: SimulatedMachine, error: Exception, *, refuses: bool) -> None:
    """Say that compiled code runs eagerly because of ``error``.

    Raises :class:`UnsupportedOperatorError` instead where that ``refuses``.
    """
    what = f"torch.compile at {user_line()} could not be followed on a simulated GPU"
    first = str(error).strip().partition("\n")[0]
    if refuses:
        raise UnsupportedOperatorError(f"{what}: {first}") from error
    machine.note(f"{what}, so it runs eagerly, and compiled code allocates less: {first}")
