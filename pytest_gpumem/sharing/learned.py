"""Durations and reserved bytes of tests, learned from earlier runs.

A JSON file in pytest's cache. A device that two tests share computes for both, so a test that ran
beside another has no usable duration (Prophet, "Precise QoS Prediction on Non-Preemptive
Accelerators to Improve Utilization in Warehouse-Scale Computers", ASPLOS 2017): such durations are
not stored. Memory is the test's own in either case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gpumem.values.plain import OMITTED, Plain

FILE_NAME = "learned.json"

IN_SHARDS = "learned-in-shards.json"
"""Lessons from runs of one shard of the suite. Shards are cut only by the other file: a machine
that starts late has to cut as the earlier ones did, though it may see their lessons."""

SCHEMA_VERSION = 1

NO_DEVICE = ""
"""Placeholder of the environment, for tests that use no GPU."""

PATIENCE = 10.0
"""Seconds to wait for another run that writes; lessons not written are learned again."""


class LearnedError(Exception):
    """A failure to store lessons; the message is one sentence for the user."""


@dataclass(frozen=True)
class Lesson(Plain):
    """The measurements of one test in one environment."""

    seconds: float | None = field(default=None, metadata=OMITTED)
    """Set-up, call and teardown, with nothing else on its device."""
    reserved: int | None = field(default=None, metadata=OMITTED)
    """Peak reserved bytes on its device."""
    predicted: int | None = field(default=None, metadata=OMITTED)
    """Peak reserved bytes by simulation; 0 where the test cannot be simulated."""

    def updated(self, newer: Lesson) -> Lesson:
        """Return a copy with the values of ``newer`` in place of its own."""
        return replace(self, **newer.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Lesson:
        """Rebuild what :meth:`to_dict` returned; values that are no numbers are left out."""
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
        """Return the lesson of a test in the environment ``key``."""
        return self._lessons.get(key, {}).get(nodeid, Lesson())

    def anywhere(self, nodeid: str) -> Lesson:
        """Return the most that a test took in any environment."""
        found = [tests[nodeid] for tests in self._lessons.values() if nodeid in tests]
        return Lesson(
            seconds=max((one.seconds for one in found if one.seconds is not None), default=None),
            reserved=max((one.reserved for one in found if one.reserved is not None), default=None),
        )

    def learn(self, key: str, nodeid: str, lesson: Lesson) -> None:
        """Add a lesson; its values replace older ones."""
        if lesson != Lesson():
            tests = self._lessons.setdefault(key, {})
            tests[nodeid] = tests.get(nodeid, Lesson()).updated(lesson)

    def merge(self, newer: Learned) -> None:
        """Add all lessons of ``newer``; lessons that it lacks stay."""
        for key, nodeid, lesson in newer:
            self.learn(key, nodeid, lesson)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: builtin types only, sorted."""
        return {
            key: {nodeid: tests[nodeid].to_dict() for nodeid in sorted(tests)}
            for key, tests in sorted(self._lessons.items())
        }

    @classmethod
    def from_dict(cls, data: Any) -> Learned:
        """Rebuild what :meth:`to_dict` returned; malformed data are left out."""
        learned = cls()
        for key, tests in data.items() if isinstance(data, dict) else ():
            for nodeid, lesson in tests.items() if isinstance(tests, dict) else ():
                if isinstance(lesson, dict):
                    learned.learn(key, nodeid, Lesson.from_dict(lesson))
        return learned


def read_learned(folder: Path, name: str = FILE_NAME) -> Learned:
    """Return the lessons of a file in ``folder``, none where it is missing or damaged.

    Like everything in a cache, they can be produced again.
    """
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads((folder / name).read_bytes())
        if isinstance(data, dict) and data.get("schema_version") == SCHEMA_VERSION:
            return Learned.from_dict(data.get("environments"))
    return Learned()


def add_learned(folder: Path, newer: Learned, name: str = FILE_NAME) -> None:
    """Add the lessons of ``newer`` to a file in ``folder``; existing ones are kept.

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
