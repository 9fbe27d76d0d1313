"""Which live blocks are cuBLAS workspaces."""

from __future__ import annotations

from pytest_gpumem.measurement.statistics import Block, Statistics


def clear_workspaces(statistics: Statistics) -> tuple[frozenset[Block], frozenset[Block]]:
    """Free the cuBLAS and cuBLASLt workspaces; return the blocks they were, and those left.

    torch does not say which of its blocks are workspaces; those that vanish by clearing them are.
    """
    before = statistics.live_blocks()
    statistics.clear_workspaces()
    after = statistics.live_blocks()
    return before - after, after
