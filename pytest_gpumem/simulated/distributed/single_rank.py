"""A world of one rank, which a process of its own begins by itself: it is one GPU.

Scripts for torchrun are run this way where there is one GPU. torch has found out how many ranks
there are when it makes the default group, and that group is a fake one then.

Source: torch/distributed/distributed_c10d.py (``init_process_group``,
``_new_process_group_helper``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.simulated.common.patching import Patches

if TYPE_CHECKING:
    from pytest_gpumem.simulated.distributed.process_groups import Groups


class SingleRank:
    """The only rank of a machine's world; ``add_patches`` adds its replacements."""

    def __init__(self, add_patches: Callable[[Patches], None]) -> None:
        self._add_patches = add_patches
        self.patches = Patches()
        """Replacements in ``torch.distributed``, which few tests need."""
        self._groups: Groups | None = None
        """This world's groups, while they are not the process's."""
        self._others: Groups | None = None
        """The process's other groups, while this world has begun."""
        self._hook: Any = None

    @property
    def has_begun(self) -> bool:
        """Whether the process is in this world now."""
        return self._others is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Enter this world inside if it had begun before, and leave it afterwards."""
        if self._groups is not None and self._groups.tables["_pg_names"]:
            self.begin()
        try:
            yield
        finally:
            self._end()

    def begin(self) -> None:
        """Enter this world, until :meth:`kept` ends."""
        if self.has_begun:
            return
        # Imported late: not needed without process groups.
        from pytest_gpumem.simulated.distributed.process_groups import Groups

        if not self.patches.added:
            self._add_patches(self.patches)
        self.patches.apply()
        self._hook = sys.excepthook
        self._others = Groups.of_process()
        (self._groups or Groups.of_new_process()).take_over(self._others)

    def _end(self) -> None:
        if self._others is None:
            return
        from pytest_gpumem.simulated.distributed.process_groups import Groups, forget_meshes

        self._groups = Groups.of_process()
        self._others.take_over(self._groups)
        self._others = None
        sys.excepthook = self._hook
        forget_meshes()
        self.patches.undo()
