"""References between objects, for many at once: each pass over the heap is for all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from pytest_gpumem.measurement.contents import items_of

CHUNK = 128
"""The number of objects examined together: most have no relevant reference."""


class Referrers:
    """The heap at one moment; objects that are made later are not in it."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        starts = range(0, len(objects), CHUNK)
        self._chunks = [objects[start : start + CHUNK] for start in starts]
        self._referents = [gc.get_referents(*chunk) for chunk in self._chunks]
        self._found: dict[int, list[Any]] = {}
        self._keys: dict[int, dict[int, Any]] = {}

    @classmethod
    def now(cls) -> Referrers:
        """Return the current heap."""
        # Called before there is an instance, or it would refer to itself and outlive its use.
        return cls(gc.get_objects())

    def tensors(self) -> list[Any]:
        """Return the tensors of the heap."""
        return list(filter(holds_memory, self._objects))

    def find(self, values: Iterable[Any]) -> None:
        """Find the objects that refer to any of ``values``."""
        wanted = {id(value) for value in values} - self._found.keys()
        if not wanted:
            return
        self._found.update((key, []) for key in wanted)
        for chunk, referents in zip(self._chunks, self._referents, strict=True):
            if not wanted.isdisjoint(map(id, referents)):
                for referrer in chunk:
                    for key in wanted.intersection(map(id, gc.get_referents(referrer))):
                        self._found[key].append(referrer)

    def of(self, value: Any) -> list[Any]:
        """Return the objects that refer to ``value``, which :meth:`find` was given."""
        return self._found[id(value)]

    def key(self, container: Any, value: Any) -> Any:
        """Return the first key or index under which ``container`` has ``value``, or ``None``."""
        keys = self._keys.get(id(container))
        if keys is None:
            keys = self._keys[id(container)] = {}
            for key, held in items_of(container):
                keys.setdefault(id(held), key)
        return keys.get(id(value))


def holds_memory(value: Any) -> bool:
    """Return whether ``value`` is a tensor, but none that torch's compilers keep for its shape."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) and kind.__module__ != "torch._subclasses.fake_tensor"
