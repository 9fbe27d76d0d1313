"""Durations and memory of tests by a report, a plan of ``gpumem plan`` or pytest-split's file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpumem.jsonfile import decoded
from pytest_gpumem.values.plain import Plain

PLAN_VERSION = 1

OF_PYTEST_SPLIT = ".test_durations"
"""File in which pytest-split keeps durations, beside the ini file."""


class WeightsError(ValueError):
    """A file without weights of tests; the message is one sentence for the user."""


@dataclass(frozen=True)
class Shard(Plain):
    """The tests of one machine."""

    runner: str
    memory: int
    """Bytes that a test can have on it."""
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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Weights:
        """Rebuild what :meth:`to_dict` returned."""
        shards = [
            Shard(one["runner"], one["memory"], one["price"], tuple(one["tests"]))
            for one in data["shards"]
        ]
        return cls(data["seconds"], data["bytes"], tuple(shards))


def read_weights(path: Path) -> Weights:
    """Return the weights in the file ``path``; raises :class:`WeightsError` where it holds none.

    From a report, only durations of tests that had their device to themselves count.
    """
    try:
        data = decoded(path.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read: {error.strerror or error}; check the path"
        ) from error
    except ValueError as error:  # a path with a NUL is one, too
        raise _foreign(path, str(error)) from error
    if isinstance(data, dict) and "matrix" in data:
        return _of_plan(path, data)
    if isinstance(data, dict) and "schema_version" in data:
        return _of_report(path)
    return Weights(seconds=_of_pytest_split(path, data))


def _of_report(path: Path) -> Weights:
    from pytest_gpumem.report.json_report import ReportError, read_report

    try:
        records = read_report(path)
    except ReportError as error:
        raise WeightsError(str(error)) from error
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


def _of_plan(path: Path, data: Mapping[str, Any]) -> Weights:
    if data.get("schema_version") != PLAN_VERSION:
        raise WeightsError(
            f"{path} has schema_version {data.get('schema_version')!r} and this pytest-gpumem "
            f"reads plans of {PLAN_VERSION}; write it anew with gpumem plan --output"
        )
    try:
        weights = Weights.from_dict(data)
    except (KeyError, TypeError) as error:
        raise _foreign(path, f"{error} is missing or wrong") from error
    return weights


def _of_pytest_split(path: Path, data: Any) -> dict[str, float]:
    try:
        found = {str(nodeid): float(seconds) for nodeid, seconds in dict(data).items()}
    except (TypeError, ValueError) as error:
        raise _foreign(path, "no seconds by test id") from error
    if any(not 0 <= seconds < math.inf for seconds in found.values()):
        raise _foreign(path, "a duration that is none")
    return found


def _foreign(path: Path, problem: str) -> WeightsError:
    return WeightsError(
        f"{path} does not say what tests take: {problem}; give a file of "
        "--gpumem-report json:PATH, of gpumem plan --output or of pytest-split"
    )
