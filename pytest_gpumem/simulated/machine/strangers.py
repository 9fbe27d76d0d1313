"""GPUs that a thread of an earlier test still works on.

Its allocations are no part of the present test. A GPU has one memory for all threads, so while
there is such a thread its GPU gives every thread the memory that is its own: the present test's,
or one beside it.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.machine.machine import GPU

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_gpumem.simulated.gpu.workspaces import Workspaces


class SharedGPU(GPU):
    """A GPU with a memory beside its own, for threads of earlier tests.

    A GPU without such threads does not ask which thread uses it.
    """

    strangers: Collection[int]
    """The threads of earlier tests."""
    met: Callable[[int], None]
    """Called with each of these threads that uses the GPU."""
    beside: tuple[Memory, Workspaces]
    """Memory and workspaces of these threads."""
    own_class: type[GPU]
    """The class of the GPU without these threads."""

    # Properties take precedence over the instance's attributes.

    @property
    def allocator(self) -> Memory:
        """The memory of the calling thread."""
        own: Memory = vars(self)["allocator"]
        thread = get_ident()
        if thread not in self.strangers:
            return own
        self.met(thread)
        return self.beside[0]

    @allocator.setter
    def allocator(self, memory: Memory) -> None:
        vars(self)["allocator"] = memory

    @property
    def workspaces(self) -> Workspaces:
        """The workspaces of the calling thread."""
        own: Workspaces = vars(self)["workspaces"]
        return self.beside[1] if get_ident() in self.strangers else own

    @workspaces.setter
    def workspaces(self, workspaces: Workspaces) -> None:
        vars(self)["workspaces"] = workspaces


_KINDS: dict[type[GPU], type[SharedGPU]] = {}
"""By the class of a GPU without strangers: its class while there are some."""


def _shared_kind(kind: type[GPU]) -> type[SharedGPU]:
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Shared{kind.__name__}", (SharedGPU, kind), {"own_class": kind})
    return _KINDS[kind]


def keep_apart(gpu: GPU, strangers: Collection[int], met: Callable[[int], None]) -> None:
    """Give ``strangers`` a memory of their own on ``gpu`` for as long as there are any.

    ``met`` is called with each that uses the GPU.
    """
    shared: Any = gpu
    if not strangers:
        shared.__class__ = getattr(gpu, "own_class", type(gpu))
    elif not isinstance(gpu, SharedGPU):
        memory = gpu.memory_beside()
        shared.beside = memory, gpu.workspaces_in(memory)
        shared.strangers, shared.met = strangers, met
        shared.__class__ = _shared_kind(type(gpu))
