"""Imports of the stand-in by code under test, while a simulation is active.

Its finder is the last of ``sys.meta_path``, which Python tries for modules that no other has found:
an installed library is always the real one. Metadata is served in the same way, because libraries
look for others by ``importlib.metadata`` as well as by importing them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.values.errors import UnsupportedModuleError

NAME, VERSION, PACKAGE = "flash-attn", "2.8.3", "flash_attn"
"""The distribution, which cannot be installed without CUDA's compiler, the release whose sources
the allocations are from, and the package that programs import."""

_WITHOUT = frozenset(
    f"{PACKAGE}.{module}"
    for module in (
        *("cute", "flash_attn_triton", "flash_attn_triton_amd", "flash_attn_triton_og"),
        *("flash_blocksparse_attention", "flash_blocksparse_attn_interface", "layers", "losses"),
        *("models", "modules", "ops", "utils"),
    )
)
"""Modules of that release without a stand-in, with all modules below them."""

_ABSENT = frozenset({f"{PACKAGE}.flash_attn_interface.flash_attn_cuda"})
"""Names that other libraries look up in its modules, and that this release does not have."""


def _is_missing() -> bool:
    """Return whether the package is not installed."""
    return _is_nowhere(PACKAGE, tuple(sys.path))


@lru_cache(maxsize=256)
def _is_nowhere(module: str, path: tuple[str, ...]) -> bool:
    return PathFinder.find_spec(module, list(path)) is None


_listeners: list[Callable[[str], None]] = []
"""Listeners of the active simulations, innermost last: imports concern the whole process."""


def used() -> None:
    """Report that the stand-in has allocated something."""
    if _listeners:
        _listeners[-1](f"{NAME} is not installed: a stand-in allocated what {NAME} {VERSION} does")


_modules: dict[str, ModuleType] = {}
"""Every module made so far: code that keeps one gets the same one at a later import."""


@contextmanager
def make_importable(note: Callable[[str], None]) -> Iterator[None]:
    """Make flash-attn importable inside if it is not installed; ``note`` gets notes of its use."""
    finder = _Finder()
    with _cached_answers_cleared():
        _listeners.append(note)
        sys.meta_path.append(finder)
        try:
            yield
        finally:
            _listeners.pop()
            sys.meta_path.remove(finder)
            for name, module in _modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]


class StandInModule(ModuleType):
    """A module of the library; names without a stand-in are refused."""

    def __getattr__(self, name: str) -> Any:
        # Python and its tools read names with underscores from every module.
        path = f"{self.__name__}.{name}"
        if name.startswith("__") or path in _ABSENT:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if path not in _contents():
            _refuse(path)
        # "from library import module" reads an attribute first.
        return importlib.import_module(path)


_WHY = (
    f"has no stand-in, and {NAME} is not installed: "
    "describe the function that calls it with pytest_gpumem.simulate_operator, or install "
    "the library and run pytest --gpumem-device=dry"
)


def _refuse(name: str) -> NoReturn:
    """Raise an error that code catches which can do without this part of the library."""
    if _listeners:
        _listeners[-1](f"{name} has no stand-in: code that can do without {NAME} does")
    raise UnsupportedModuleError(f"{name} at {user_line()} {_WHY}")


_ANY = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """A finder of the library's modules and metadata, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE or not _is_missing():
            return None
        # Modules without a stand-in are found, too: asking for them imports nothing.
        is_package = fullname == PACKAGE or _has_none(fullname)
        if not is_package and fullname not in _contents():
            return None
        return ModuleSpec(fullname, _Making(), is_package=is_package)

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY
    ) -> Iterable[Distribution]:
        # PEP 503.
        asked = None if context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        if asked in (None, NAME) and _is_missing():
            yield _Metadata()


def _has_none(module: str) -> bool:
    """Return whether the release has ``module`` but the stand-in does not."""
    return any(f"{module}.".startswith(f"{each}.") for each in _WITHOUT)


class _Making(Loader):
    """A loader that makes each module once."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a new module, or that of an earlier import; refuse one without a stand-in."""
        if _has_none(spec.name):
            _refuse(spec.name)
        return _modules.get(spec.name) or StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ not in _modules:
            vars(module).update(_contents()[module.__name__])
            _modules[module.__name__] = module


class _Metadata(Distribution):
    """The metadata that pip would have written."""

    _FILES: Mapping[str, str] = {
        "METADATA": (f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"),
        "top_level.txt": f"{PACKAGE}\n",
    }

    def read_text(self, filename: str) -> str | None:
        return self._FILES.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


def _contents() -> Mapping[str, Mapping[str, Any]]:
    module = importlib.import_module(f"{__package__}.{PACKAGE}")
    contents: Mapping[str, Mapping[str, Any]] = module.MODULES
    return contents


# Libraries that check once whether another one is installed, and remember the answer.

_ASKING = "transformers.utils.import_utils"
_QUESTIONS = (
    "is_torch_cuda_available",
    "is_flash_attn_2_available",
    "is_flash_attn_greater_or_equal",
    "is_flash_attn_greater_or_equal_2_10",
)
"""Functions of transformers whose answers a cache remembers (5.23)."""


@contextmanager
def _cached_answers_cleared() -> Iterator[None]:
    """Clear cached answers of other libraries, before and after."""
    _forget_answers()
    if _is_missing():
        _distributions()[PACKAGE] = [NAME]
    try:
        yield
    finally:
        if _is_missing():
            _distributions().pop(PACKAGE, None)
        _forget_answers()


def _forget_answers() -> None:
    asking = sys.modules.get(_ASKING)
    for name in _QUESTIONS if asking is not None else ():
        forget = getattr(getattr(asking, name, None), "cache_clear", None)
        if forget is not None:
            forget()


def _distributions() -> dict[str, list[str]]:
    """Return the ``importlib.metadata.packages_distributions()`` that transformers remembers."""
    asking = vars(sys.modules.get(_ASKING, ModuleType("")))
    mapping = asking.get("PACKAGE_DISTRIBUTION_MAPPING")  # of transformers 4
    remembering = asking.get("_package_distribution_mapping")
    if mapping is None and remembering is not None and remembering.cache_info().currsize:
        mapping = remembering()
    return mapping if isinstance(mapping, dict) else {}
