"""Modules first imported during a simulation: without replaced names, or replaced themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

from pytest_gpumem.garbage import paused
from pytest_gpumem.late_modules import Context, Finder, Wrapped, watched

Answers = Callable[[str, FrameType], Any]
"""(name, frame of the reader) -> the module's attribute, or ``None`` to import the real one."""

_ASKED_OF_EVERY_MODULE = ("__path__", "__warningregistry__")
"""Read by import statements, where only packages have them, and by ``TestCase.assertWarns``."""


class StandIn(ModuleType):
    """A stand-in in ``sys.modules`` until an attribute is read that ``answers`` does not have.

    Then the real module is imported, and this one reads its attributes there. ``known`` are
    attributes that every importer gets and may keep.
    """

    def __init__(
        self,
        name: str,
        answers: Answers,
        unpatched: Context,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name)
        spec = _spec(name)
        # Importing submodules and looking through sys.modules read these of every module.
        vars(self).update(
            __package__=spec.parent,
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            _answers=answers,
            _unpatched=unpatched,
            **(known or {}),
        )
        if spec.submodule_search_locations is not None:
            vars(self)["__path__"] = spec.submodule_search_locations

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the real module inside, until it is needed; it must not be imported yet."""
        sys.modules[self.__name__] = self
        try:
            yield
        finally:
            if self._stands:
                del sys.modules[self.__name__]

    @property
    def _stands(self) -> bool:
        return sys.modules.get(self.__name__) is self

    def real(self) -> ModuleType:
        """Return the real module, imported without replaced names."""
        if not self._stands:
            return importlib.import_module(self.__name__)
        del sys.modules[self.__name__]
        try:
            with self._unpatched():
                return importlib.import_module(self.__name__)
        except BaseException:
            sys.modules[self.__name__] = self
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED_OF_EVERY_MODULE:
            raise AttributeError(name)
        answer = self._answers(name, sys._getframe(1)) if self._stands else None
        return getattr(self.real(), name) if answer is None else answer

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.real(), name)

    def __dir__(self) -> list[str]:
        return dir(self.real())


def imported_unpatched(
    package: str, unpatched: Context, *, but: Sequence[str] = ()
) -> AbstractContextManager[None]:
    """Import the modules of ``package`` inside without replaced names, which they would keep.

    Parts of it that are named in ``but`` are imported with replaced names.
    """

    def wrapper_of(name: str) -> Callable[[Loader], Loader] | None:
        parent_is_stand_in = isinstance(sys.modules.get(name.rpartition(".")[0]), StandIn)
        is_excepted = any(f"{name}.".startswith(f"{part}.") for part in but)
        if not parent_is_stand_in and (is_excepted or not name.startswith(f"{package}.")):
            return None
        return partial(_UnpatchedLoader, nullcontext if is_excepted else unpatched)

    return watched(Finder(wrapper_of, set()))


class _UnpatchedLoader(Wrapped):
    """A loader that runs ``loader`` without replaced names."""

    def __init__(self, unpatched: Context, loader: Loader) -> None:
        super().__init__(loader)
        self._unpatched = unpatched
        self._own_spec: ModuleSpec | None = None
        """The spec of a module that was imported when its package replaced a stand-in."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the loader makes, or the one that its package has imported."""
        package = sys.modules.get(spec.name.rpartition(".")[0])
        if isinstance(package, StandIn):
            package.real()
            module = sys.modules.get(spec.name)
            if module is not None:
                self._own_spec = module.__spec__
                return module
        return super().create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._own_spec is not None:
            vars(module)["__spec__"] = self._own_spec  # torch's config modules refuse setattr
            return
        # A garbage collection may start a thread (a loader's, for its workers) that would wait for
        # the import of this module, while this thread waits for that one.
        with self._unpatched(), paused():
            super().exec_module(module)


@cache
def _spec(name: str) -> ModuleSpec:
    spec = find_spec(name)
    assert spec is not None, f"torch imports {name}"
    return spec
