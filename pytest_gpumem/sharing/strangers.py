"""What others hold of a device, told from what the driver says and what workers say of themselves.

A driver does not always say whose the memory is: in a container the PIDs may be those of the host,
or no process may be listed at all; under WSL2 none of them has bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.sharing.ledger import State
    from pytest_gpumem.sharing.processes import Process

NOBODY = 0
"""Stands for the process of bytes that the driver puts down to none."""


def without_hidden(taken: Mapping[int, int], claims: Mapping[int, int]) -> dict[int, int]:
    """Return ``taken`` without those of :data:`NOBODY`'s bytes that may be the workers'.

    Args:
        taken: bytes by process, as the driver tells.
        claims: bytes by process that each worker may hold, by its own word. Those whom the driver
            does not show may hold as many of nobody's.
    """
    hidden = sum(claim for pid, claim in claims.items() if not taken.get(pid))
    return {**taken, NOBODY: max(taken.get(NOBODY, 0) - hidden, 0)}


def claims_of(state: State, device: str, owners: Mapping[int, Process]) -> dict[int, int]:
    """Return what each worker may hold of ``device``, by process: what it holds and is granted."""
    found = state.devices[device]
    claims = dict.fromkeys((process.pid for process in owners.values()), 0)
    for worker, process in owners.items():
        held = found.contexts.get(worker, 0) + found.fixtures.get(worker, 0)
        granted = sum(
            lease.request.needs.get(device, 0)
            for lease in state.running
            if lease.request.owner == worker
        )
        claims[process.pid] += held + granted
    return claims
