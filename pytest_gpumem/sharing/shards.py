"""A suite cut into shards of about the same time and memory.

pytest-split uses durations only, and its parts are of equal time; machines that share a GPU
between workers take as long as the larger of two things, all seconds and all seconds times bytes.
Its file of durations is read, see :mod:`pytest_gpumem.sharing.weights`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from pytest_gpumem.echo import quoted

UNKNOWN_SECONDS = 1.0
"""Seconds of every test where no test has a known duration."""


@dataclass(frozen=True)
class Weight:
    """The expected cost of a test, or of a group that stays together."""

    name: str
    seconds: float | None = None
    """``None`` if unknown: then the mean of the others."""
    bytes: int | None = None
    """Bytes of the device; ``None`` likewise."""


def split(tests: Collection[Weight], count: int) -> list[list[str]]:
    """Return the names of ``tests`` in ``count`` parts, each in exactly one of them.

    The heaviest first, each to the part that has least so far (R. L. Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969), of seconds or of seconds times bytes, whichever counts
    more. Depends on nothing but names and weights: every machine that has the same ones finds the
    same parts, in whatever order the tests came.
    """
    tests = sorted(tests, key=lambda test: test.name)  # sums of floats depend on their order
    seconds = _filled([test.seconds for test in tests], UNKNOWN_SECONDS)
    sizes = _filled([None if test.bytes is None else float(test.bytes) for test in tests], 0.0)
    times = _shares(seconds)
    areas = _shares([one * size for one, size in zip(seconds, sizes, strict=True)])
    heaviest = sorted(zip(tests, times, areas, strict=True), key=lambda one: -max(one[1:]))
    parts = [_Part() for _ in range(count)]
    for test, time, area in heaviest:
        part = min(parts, key=lambda part: part.load_with(time, area))
        part.add(test.name, time, area)
    return [sorted(part.names) for part in parts]


def parse_shard(text: str) -> tuple[int, int]:
    """Return the numbers of ``"2/4"``; raises ``ValueError`` for anything else."""
    numbers = re.fullmatch(r"\s*([0-9]{1,6})/([0-9]{1,6})\s*", text)
    shard = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"{quoted(text)} is not a shard; write K/N with K from 1 to N, like 2/4")
    return shard


def fingerprint(parts: Iterable[Sequence[str]]) -> str:
    """Return eight hex digits that differ where two machines have cut a suite differently."""
    text = "\0\0".join("\0".join(names) for names in parts)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class _Part:
    def __init__(self) -> None:
        self.names: list[str] = []
        self._time = self._area = 0.0

    def load_with(self, time: float, area: float) -> tuple[float, int]:
        return max(self._time + time, self._area + area), len(self.names)

    def add(self, name: str, time: float, area: float) -> None:
        self.names.append(name)
        self._time += time
        self._area += area


def _filled(values: Sequence[float | None], unknown: float) -> list[float]:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else unknown
    return [mean if value is None else value for value in values]


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else [0.0 for _ in values]
