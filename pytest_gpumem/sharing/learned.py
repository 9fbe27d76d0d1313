"""What earlier runs have learned of tests: how long each took alone, and what it reserved.

A JSON file in pytest's cache. A device that two tests share computes for both, so a test that ran
beside another says nothing of its own duration (Prophet, "Precise QoS Prediction on Non-Preemptive
Accelerators to Improve Utilization in Warehouse-Scale Computers", ASPLOS 2017): such durations
never get here. Memory is the test's own in any company.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FILE_NAME = "learned.json"

IN_SHARDS = "learned-in-shards.json"
"""What runs of a part of the suite have learned. Parts are cut by the other file alone: a machine
that comes late has to cut as those before it did, though it may see what they have learned."""

SCHEMA_VERSION = 1

NO_DEVICE = ""
"""Stands for an environment, of tests that use no GPU."""

PATIENCE = 10.0
"""Seconds to wait for another run that writes; what is not written is learned again."""


class LearnedError(Exception):
    """What was learned cannot be kept; the message is one sentence for the user."""


@dataclass(frozen=True)
class Lesson:
    """What is known of one test in one environment."""

    seconds: float | None = None
    """Set-up, call and teardown, with nothing else on its device."""
    reserved: int | None = None
    """The most bytes that it reserved of its device."""
    predicted: int | None = None
    """The same by simulation; 0 where it cannot be simulated."""

    def updated(self, newer: Lesson) -> Lesson:
        """Return it with what ``newer`` knows in its place."""
        return replace(self, **newer.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: what is known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Lesson:
        """Rebuild what :meth:`to_dict` returned; what is no number is not known."""
        numbers = {name: data.get(name) for name in ("seconds", "reserved", "predicted")}
        return cls(**{name: value for name, value in numbers.items() if _is_amount(value)})


class Learned:
    """Lessons by environment key and node id."""

    def __init__(self) -> None:
        self._lessons: dict[str, dict[str, Lesson]] = {}

    def __bool__(self) -> bool:
        return bool(self._lessons)

    def __iter__(self) -> Iterator[tuple[str, str, Lesson]]:
        for key, tests in self._lessons.items():
            for nodeid, lesson in tests.items():
                yield key, nodeid, lesson

    def of(self, key: str, nodeid: str) -> Lesson:
        """Return what is known of a test in the environment ``key``."""
        return self._lessons.get(key, {}).get(nodeid, Lesson())

    def anywhere(self, nodeid: str) -> Lesson:
        """Return the most that a test took in any environment."""
        found = [tests[nodeid] for tests in self._lessons.values() if nodeid in tests]
        return Lesson(
            seconds=max((one.seconds for one in found if one.seconds is not None), default=None),
            reserved=max((one.reserved for one in found if one.reserved is not None), default=None),
        )

    def learn(self, key: str, nodeid: str, lesson: Lesson) -> None:
        """Take in what was learned last."""
        if lesson != Lesson():
            tests = self._lessons.setdefault(key, {})
            tests[nodeid] = tests.get(nodeid, Lesson()).updated(lesson)

    def merge(self, newer: Learned) -> None:
        """Take in all that ``newer`` knows; what it does not know stays."""
        for key, nodeid, lesson in newer:
            self.learn(key, nodeid, lesson)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only, sorted."""
        return {
            key: {nodeid: tests[nodeid].to_dict() for nodeid in sorted(tests)}
            for key, tests in sorted(self._lessons.items())
        }

    @classmethod
    def from_dict(cls, data: Any) -> Learned:
        """Rebuild what :meth:`to_dict` returned; what does not look like it is left out."""
        learned = cls()
        for key, tests in data.items() if isinstance(data, dict) else ():
            for nodeid, lesson in tests.items() if isinstance(tests, dict) else ():
                if isinstance(lesson, dict):
                    learned.learn(key, nodeid, Lesson.from_dict(lesson))
        return learned


def read_learned(folder: Path, name: str = FILE_NAME) -> Learned:
    """Return what a file in ``folder`` holds, nothing where it is missing or damaged.

    As all that a cache holds it can be had again.
    """
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads((folder / name).read_bytes())
        if isinstance(data, dict) and data.get("schema_version") == SCHEMA_VERSION:
            return Learned.from_dict(data.get("environments"))
    return Learned()


def add_learned(folder: Path, newer: Learned, name: str = FILE_NAME) -> None:
    """Add what ``newer`` knows to a file in ``folder``; nothing that stands there gets lost.

    Other runs may do so at the same time. Raises :class:`LearnedError`.
    """
    from pytest_gpumem.baseline.locks import LockError, Locks
    from pytest_gpumem.jsonfile import replace_file

    path = folder / name
    try:
        with Locks(folder, PATIENCE).holding(path) as draft:
            known = read_learned(folder, name)
            known.merge(newer)
            data = {"schema_version": SCHEMA_VERSION, "environments": known.to_dict()}
            replace_file(path, f"{json.dumps(data, indent=1)}\n".encode("ascii"), draft)
    except (LockError, OSError) as error:
        raise LearnedError(f"{path} was not written: {error}") from error


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
