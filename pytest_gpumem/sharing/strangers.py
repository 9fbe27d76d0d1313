"""Memory that other processes hold of a device, from the driver's numbers and the workers' own.

A driver does not always assign memory to processes: in a container the PIDs may be those of the
host, or no process may be listed at all; under WSL2 none of them has bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.sharing.ledger import State
    from pytest_gpumem.sharing.processes import Process

NOBODY = 0
"""The key of bytes that the driver assigns to no process."""


def without_hidden(taken: Mapping[int, int], claims: Mapping[int, int]) -> dict[int, int]:
    """Return ``taken`` without those of :data:`NOBODY`'s bytes that may be the workers'.

    Args:
        taken: bytes by process, from the driver.
        claims: bytes by process that each worker may hold, by its own account. Workers that the
            driver does not list may hold as many of :data:`NOBODY`'s.
    """
    hidden = sum(claim for pid, claim in claims.items() if not taken.get(pid))
    return {**taken, NOBODY: max(taken.get(NOBODY, 0) - hidden, 0)}


def claims_of(state: State, device: str, owners: Mapping[int, Process]) -> dict[int, int]:
    """Return the bytes that each worker may hold of ``device``, by process: held and granted."""
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
