"""Stand-ins as code under test imports them: while a simulation is active, and no longer.

Python asks the last finder of ``sys.meta_path`` for what all others have not found: so a library
that is installed is always the real one. Metadata is answered alike, because libraries look for
others by ``importlib.metadata`` as much as by importing them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES, Library, chosen
from pytest_gpumem.simulated.stand_ins.usage import Kept, telling

_modules: dict[str, ModuleType] = {}
"""Every module that was made so far: code that keeps one finds the same one later."""


@contextmanager
def served(
    names: Sequence[str] | None, note: Callable[[str], None], kept: Kept | None = None
) -> Iterator[None]:
    """Let the libraries ``names`` be imported inside if they are not installed.

    ``None`` stands for those that are there without being named.

    ``note`` takes a sentence for each that is used, ``kept`` what they keep.
    """
    libraries = chosen(names)
    if not libraries:
        yield
        return
    finder = _Finder(libraries)
    with telling(note, {} if kept is None else kept), _asked_anew(libraries), _loading(libraries):
        sys.meta_path.append(finder)
        kept = {
            name: module
            for name, module in _modules.items()
            if name not in sys.modules and finder.library_of(name) is not None
        }
        sys.modules.update(kept)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name, module in _modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]


class StandInModule(ModuleType):
    """A module of a library; what it lacks is refused by name."""

    def __getattr__(self, name: str) -> Any:
        # Of names with underscores, Python and its tools ask every module.
        path = f"{self.__name__}.{name}"
        if name.startswith("__") or any(path in each.absent for each in LIBRARIES.values()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not _is_module(path):
            _refuse(path)
        # "from library import module" asks for an attribute first.
        return importlib.import_module(path)


def _is_module(path: str) -> bool:
    package = path.partition(".")[0]
    found = (each for each in LIBRARIES.values() if package in _top_level(each))
    return any(path in _contents(each) for each in found)


def _refuse(path: str, installing: str = "") -> NoReturn:
    if installing:
        raise UnsupportedOperatorError(
            f"{path} at {user_line()} has a stand-in for its kernels, and its Python code is not "
            f"installed, which needs no CUDA: {installing}"
        )
    raise UnsupportedOperatorError(
        f"{path} at {user_line()} has no stand-in, and its library is not installed: describe "
        f"what calls it with pytest_gpumem.simulate_operator, or leave the library out with "
        f"--gpumem-sim-stand-ins"
    )


_ANY = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """Finds modules and metadata of ``libraries`` where nobody else does."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        self._libraries = libraries
        self._by_package = {name: library for library in libraries for name in _top_level(library)}
        self._by_extension = {name: each for each in libraries for name in each.compiled}

    def library_of(self, module: str) -> Library | None:
        """The library that ``module`` is of, if it is not installed."""
        library = self._by_package.get(module.partition(".")[0])
        if library is not None:
            return library if library.is_missing else None
        library = self._by_extension.get(module)
        return library if library is not None and library.is_uncompiled else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of a stand-in."""
        library = self.library_of(fullname)
        if library is None:
            return None
        if library.lacks(fullname):
            return ModuleSpec(fullname, _Refusing(library.installing), is_package=True)
        if fullname in library.compiled:
            return ModuleSpec(fullname, _Making(library))
        names = [library.package] if fullname == library.package else _contents(library)
        if fullname not in names:
            return None
        package = fullname == library.package or any(
            name.startswith(f"{fullname}.") for name in names
        )
        return ModuleSpec(fullname, _Making(library), is_package=package)

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY
    ) -> Iterable[Distribution]:
        """Find the metadata of libraries that are not installed: all, or those of one name."""
        asked = None if context.name is None else _normalized(context.name)
        for library in self._libraries:
            if asked in (None, library.name) and library.is_missing:
                yield _Metadata(library)


class _Making(Loader):
    """Makes modules of ``library``, once each."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module, or take the one that was made before."""
        return _modules.get(spec.name) or StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module what it has."""
        vars(module).update(_contents(self._library)[module.__name__])
        _modules[module.__name__] = module


class _Refusing(Loader):
    """Says of a module of the real library that there is no stand-in for it."""

    def __init__(self, installing: str) -> None:
        self._installing = installing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Refuse."""
        _refuse(spec.name, self._installing)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: no module is made."""


class _Metadata(Distribution):
    """What pip would have written of a library."""

    def __init__(self, library: Library) -> None:
        self._files = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {library.name}\nVersion: {library.version}\n"
            ),
            "top_level.txt": "\n".join((*_top_level(library), "")),
        }

    def read_text(self, filename: str) -> str | None:
        """One of the files, if there is such a one."""
        return self._files.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Where a file would be: it is nowhere."""
        return Path(path)


def _top_level(library: Library) -> tuple[str, ...]:
    return (library.package, *library.beside)


def _contents(library: Library) -> Mapping[str, Mapping[str, Any]]:
    module = importlib.import_module(f"{__package__}.{library.package}")
    contents: Mapping[str, Mapping[str, Any]] = module.MODULES
    return contents


def _normalized(name: str) -> str:
    # PEP 503.
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def _loading(libraries: Sequence[Library]) -> Iterator[None]:
    """Let extensions that only CUDA's torch can load be missed by nobody inside."""
    packages = {each.package: each.loaded for each in libraries if each.loaded}
    if not packages:
        yield
        return
    real: Callable[[Any], None] = torch.ops.load_library

    def load_library(path: Any) -> None:
        try:
            real(path)
        except OSError:
            file = Path(path)
            if packages.get(file.parent.name) != file.name.partition(".")[0]:
                raise

    patches = Patches()
    patches.plan(torch.ops, "load_library", load_library)
    patches.apply()
    try:
        yield
    finally:
        patches.undo()


# Libraries that ask once whether another one is there, and remember the answer.

_ASKING = "transformers.utils.import_utils"
_QUESTIONS = (
    "is_torch_cuda_available",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
    "is_flash_attn_4_available",
    "is_flash_attn_greater_or_equal",
    "is_flash_attn_greater_or_equal_2_10",
    "is_causal_conv1d_available",
    "is_mamba_ssm_available",
    "is_mamba_2_ssm_available",
)
"""Functions of transformers whose answers a cache remembers (5.23)."""


@contextmanager
def _asked_anew(libraries: Sequence[Library]) -> Iterator[None]:
    """Let what others remember of ``libraries`` hold inside, and not beyond."""
    _forget_answers()
    missing = [library for library in libraries if library.is_missing]
    known = _distributions()
    known.update({name: [each.name] for each in missing for name in _top_level(each)})
    try:
        yield
    finally:
        known = _distributions()
        for name in (name for each in missing for name in _top_level(each)):
            known.pop(name, None)
        _forget_answers()


def _forget_answers() -> None:
    asking = sys.modules.get(_ASKING)
    for name in _QUESTIONS if asking is not None else ():
        forget = getattr(getattr(asking, name, None), "cache_clear", None)
        if forget is not None:
            forget()


def _distributions() -> dict[str, list[str]]:
    """What transformers remembers of ``importlib.metadata.packages_distributions()``."""
    asking = vars(sys.modules.get(_ASKING, ModuleType("")))
    mapping = asking.get("PACKAGE_DISTRIBUTION_MAPPING")  # of transformers 4
    remembering = asking.get("_package_distribution_mapping")
    if mapping is None and remembering is not None and remembering.cache_info().currsize:
        mapping = remembering()
    return mapping if isinstance(mapping, dict) else {}
