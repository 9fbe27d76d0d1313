"""Installed distributions, parsed once: each of the many pytest runs in this process reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import Any

_usual = metadata.distributions


def remembering(**options: Any) -> Iterator[metadata.Distribution]:
    """Yield what ``importlib.metadata.distributions()`` yields, each parsed only once."""
    for one in _usual(**options):
        path: Any = getattr(one, "_path", None)  # a folder, where the usual finder found it
        yield one if path is None else _remembered(path)


@cache
def _remembered(path: Any) -> Any:
    return _Remembered(metadata.PathDistribution(path))


class _Remembered:
    """A distribution whose metadata, entry points and files are parsed once."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self._distribution = distribution

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._distribution, name)
        setattr(self, name, value)
        return value
