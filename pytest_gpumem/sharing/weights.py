"""Durations and memory of tests, by which a suite is cut into shards of about equal run time.

They are read from a report, a plan of ``gpumem plan`` or pytest-split's file. pytest-split makes
parts of equal duration. On a machine whose workers share a GPU, the run time depends on the sum of
seconds or on the sum of seconds times bytes, whichever takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from pytest_gpumem.jsonfile import decoded
from pytest_gpumem.values.serialization import Plain

PLAN_VERSION = 1

OF_PYTEST_SPLIT = ".test_durations"
"""File in which pytest-split keeps durations, beside the ini file."""


@dataclass(frozen=True)
class Shard(Plain):
    """The tests of one machine."""

    runner: str
    memory: int
    """Bytes that a test can use on it."""
    price: float
    """Price of an hour."""
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Weights(Plain):
    """Durations and memory of tests, by node id."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    """The shards of a plan: the tests of each machine."""


def read_weights(path: Path) -> Weights:
    """Return the weights in the file ``path``; raises ``ValueError`` where it holds none.

    From a report, only durations of tests that had their device to themselves count.
    """
    try:
        data = decoded(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}; check the path"
        ) from error
    except ValueError as error:  # a path with a NUL is one, too
        raise _unreadable(path, str(error)) from error
    if isinstance(data, dict) and "matrix" in data:
        return _weights_of_plan(path, data)
    if isinstance(data, dict) and "schema_version" in data:
        return _weights_of_report(path)
    return Weights(seconds=_seconds_of_pytest_split(path, data))


def _weights_of_report(path: Path) -> Weights:
    from pytest_gpumem.report.json_report import read_report

    records = read_report(path)
    return Weights(
        seconds={
            record.nodeid: record.duration
            for record in records
            if record.duration is not None and not record.beside
        },
        bytes={
            record.nodeid: max(record.measurement.peak_reserved, 0)
            for record in records
            if record.measurement is not None
        },
    )


def _weights_of_plan(path: Path, data: Mapping[str, Any]) -> Weights:
    if data.get("schema_version") != PLAN_VERSION:
        raise ValueError(
            f"{path} has schema_version {data.get('schema_version')!r} and this pytest-gpumem "
            f"reads plans of {PLAN_VERSION}; write it anew with gpumem plan --output"
        )
    try:
        # A plan has further fields, which are not read here.
        shards = [{one.name: shard[one.name] for one in fields(Shard)} for shard in data["shards"]]
        known = {"seconds": data["seconds"], "bytes": data["bytes"], "shards": shards}
        return Weights.from_dict(known)
    except (KeyError, TypeError) as error:
        raise _unreadable(path, f"{error} is missing or wrong") from error


def _seconds_of_pytest_split(path: Path, data: Any) -> dict[str, float]:
    try:
        found = {str(nodeid): float(seconds) for nodeid, seconds in dict(data).items()}
    except (TypeError, ValueError) as error:
        raise _unreadable(path, "no seconds by test id") from error
    if any(not 0 <= seconds < math.inf for seconds in found.values()):
        raise _unreadable(path, "a duration that is none")
    return found


def _unreadable(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path} does not say what tests take: {problem}; give a file of "
        "--gpumem-report json:PATH, of gpumem plan --output or of pytest-split"
    )


@dataclass(frozen=True)
class Weight:
    """The expected cost of a test, or of a group that stays together."""

    name: str
    seconds: float | None = None
    """``None`` if unknown: then the mean of the known ones counts."""
    bytes: int | None = None
    """Bytes of the device; ``None`` likewise."""


def split(tests: Collection[Weight], count: int) -> list[list[str]]:
    """Return the names of ``tests`` in ``count`` parts, each in exactly one of them.

    The heaviest tests are assigned first, each to the part that has least so far (R. L. Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969): least seconds or seconds times bytes,
    whichever is the larger share. The result depends only on names and weights, and not on the
    order of tests, so that every machine computes the same parts.
    """
    tests = sorted(tests, key=lambda test: test.name)  # sums of floats depend on their order
    seconds = _filled([test.seconds for test in tests], unknown=1.0)
    sizes = _filled(
        [None if test.bytes is None else float(test.bytes) for test in tests], unknown=0.0
    )
    times = _shares(seconds)
    areas = _shares([one * size for one, size in zip(seconds, sizes, strict=True)])
    heaviest = sorted(zip(tests, times, areas, strict=True), key=lambda one: -max(one[1:]))
    parts: list[list[str]] = [[] for _ in range(count)]
    sums = [(0.0, 0.0)] * count
    for test, time, area in heaviest:
        loads = [
            (max(times + time, areas + area), len(names))
            for names, (times, areas) in zip(parts, sums, strict=True)
        ]
        at = loads.index(min(loads))
        parts[at].append(test.name)
        sums[at] = sums[at][0] + time, sums[at][1] + area
    return list(map(sorted, parts))


def fingerprint(parts: Iterable[Sequence[str]]) -> str:
    """Return eight hex digits that differ where two machines have cut a suite differently."""
    text = "\0\0".join("\0".join(names) for names in parts)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _filled(values: Sequence[float | None], unknown: float) -> list[float]:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else unknown
    return [mean if value is None else value for value in values]


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else [0.0 for _ in values]
