"""The library that has a stand-in: its name, release and modules, and reports of its use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder


@dataclass(frozen=True)
class Library:
    """A library that cannot be installed without CUDA's compiler."""

    name: str
    """The name of its distribution."""
    version: str
    """The release whose sources the allocations are from."""
    package: str
    """The package that programs import, and the folder of this one that stands for it."""
    without: frozenset[str]
    """Modules of that release without a stand-in, with all modules below them."""
    absent: frozenset[str]
    """Names that other libraries look up in its modules, and that release does not have."""

    @property
    def is_missing(self) -> bool:
        """Whether the package is not installed."""
        return _is_nowhere(self.package, tuple(sys.path))

    @property
    def sentence(self) -> str:
        """The note of a measurement that the stand-in has a part in."""
        return (
            f"{self.name} is not installed: a stand-in allocated what {self.name} {self.version} "
            f"does"
        )

    def lacks(self, module: str) -> bool:
        """Return whether the release has ``module``, and the stand-in does not."""
        return any(module == each or module.startswith(f"{each}.") for each in self.without)


@lru_cache(maxsize=256)
def _is_nowhere(module: str, path: tuple[str, ...]) -> bool:
    return PathFinder.find_spec(module, list(path)) is None


FLASH_ATTN = Library(
    "flash-attn",
    "2.8.3",
    "flash_attn",
    without=frozenset(
        f"flash_attn.{module}"
        for module in (
            "cute",
            "flash_attn_triton",
            "flash_attn_triton_amd",
            "flash_attn_triton_og",
            "flash_blocksparse_attention",
            "flash_blocksparse_attn_interface",
            "layers",
            "losses",
            "models",
            "modules",
            "ops",
            "utils",
        )
    ),
    absent=frozenset({"flash_attn.flash_attn_interface.flash_attn_cuda"}),
)

_listeners: list[Callable[[str], None]] = []
"""Listeners of the active simulations, innermost last: imports are the process's."""


@contextmanager
def telling(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` with a sentence when the stand-in is used inside."""
    _listeners.append(note)
    try:
        yield
    finally:
        _listeners.pop()


def used() -> None:
    """Report that the stand-in has allocated something."""
    if _listeners:
        _listeners[-1](FLASH_ATTN.sentence)
