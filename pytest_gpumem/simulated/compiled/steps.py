"""Steps that code has marked with ``torch.compiler.cudagraph_mark_step_begin()``.

torch counts them for the process. Once there is one, only the next begins a step: results of CUDA
graphs are overwritten then, and no longer by each call. So they belong to the machine that was
active, and end with the test.

Source: torch/_inductor/cudagraph_trees.py (MarkStepBox, get_curr_generation), torch 2.6 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TREES = "torch._inductor.cudagraph_trees"


class MarkedSteps:
    """The number of steps that the code of one machine has marked."""

    def __init__(self) -> None:
        self._count = 0
        self._are_counted = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Show torch only these steps for the duration of the context."""
        others = _exchanged(self._count)
        self._are_counted = True
        try:
            yield
        finally:
            self._are_counted = False
            self._count = _exchanged(others)

    def forget(self) -> None:
        """Reset the count of marked steps."""
        self._count = 0
        if self._are_counted:
            _exchanged(0)


def _exchanged(count: int) -> int:
    """Set torch's count to ``count``; return the old one."""
    trees = sys.modules.get(_TREES)
    if trees is None:
        return 0
    before: int = trees.MarkStepBox.mark_step_counter
    trees.MarkStepBox.mark_step_counter = count
    return before
