"""Durations and reserved bytes of tests, learned from earlier runs.

A JSON file in pytest's cache. A test that ran beside another on the same device was slowed down
(Prophet, "Precise QoS Prediction on Non-Preemptive Accelerators to Improve Utilization in
Warehouse-Scale Computers", ASPLOS 2017), so its duration is not stored. Its memory is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_gpumem.values.serialization import OMITTED, Plain

if TYPE_CHECKING:
    import pytest

FILE_NAME = "learned.json"

IN_SHARDS = "learned-in-shards.json"
"""File of costs from runs of a shard. Shards are computed only from the other file: a machine that
starts late must compute the same shards, although it may see the costs of earlier machines."""

SCHEMA_VERSION = 1

NO_DEVICE = ""
"""Placeholder of the environment, for tests that use no GPU."""

PATIENCE = 10.0
"""Seconds to wait while another run writes; costs not written are learned again."""

INPUT = "gpumem_learned"
"""Key of a pytest-xdist worker's input: the data of earlier runs."""

WEIGHTS = "gpumem_weights"
"""Key of a pytest-xdist worker's input: the weights of shards, so that all workers agree."""


@dataclass(frozen=True)
class TestCost(Plain):
    """The measurements of one test in one environment."""

    __test__: ClassVar[bool] = False  # pytest would take the name for a test class

    seconds: float | None = field(default=None, metadata=OMITTED)
    """Seconds of set-up, call and teardown, from a run alone on its device."""
    reserved: int | None = field(default=None, metadata=OMITTED)
    """Peak reserved bytes on its device."""
    predicted: int | None = field(default=None, metadata=OMITTED)
    """Peak reserved bytes by simulation; 0 where the test cannot be simulated."""
    devices: int = field(default=1, metadata=OMITTED)
    """The number of devices that it uses, beginning with its worker's device."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TestCost:
        """Return the cost from :meth:`to_dict`'s form; values that are no numbers are left out."""
        numbers: dict[str, Any] = {one.name: data.get(one.name) for one in fields(cls)}
        given: dict[str, Any] = {
            name: value
            for name, value in numbers.items()
            if type(value) in (int, float) and 0 <= value < 1e18
        }
        return cls(**given)


class Learned:
    """Costs of tests by environment key and node id."""

    def __init__(self) -> None:
        self._costs: dict[str, dict[str, TestCost]] = {}

    def __bool__(self) -> bool:
        return bool(self._costs)

    def __iter__(self) -> Iterator[tuple[str, str, TestCost]]:
        for key, tests in self._costs.items():
            for nodeid, cost in tests.items():
                yield key, nodeid, cost

    def of(self, key: str, nodeid: str) -> TestCost:
        """Return the cost of a test in the environment ``key``."""
        return self._costs.get(key, {}).get(nodeid, TestCost())

    def anywhere(self, nodeid: str) -> TestCost:
        """Return the largest cost of a test in any environment."""
        found = [tests[nodeid] for tests in self._costs.values() if nodeid in tests]
        return TestCost(
            seconds=max((one.seconds for one in found if one.seconds is not None), default=None),
            reserved=max((one.reserved for one in found if one.reserved is not None), default=None),
        )

    def learn(self, key: str, nodeid: str, cost: TestCost) -> None:
        """Add a cost; its values replace older ones."""
        if cost != TestCost():
            known = replace(self.of(key, nodeid), **cost.to_dict())
            if cost.reserved is not None:  # it was measured
                known = replace(known, devices=cost.devices)
            self._costs.setdefault(key, {})[nodeid] = known

    def merge(self, newer: Learned) -> None:
        """Add all costs of ``newer``; costs that it lacks stay."""
        for key, nodeid, cost in newer:
            self.learn(key, nodeid, cost)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: builtin types only, sorted."""
        return {
            key: {nodeid: tests[nodeid].to_dict() for nodeid in sorted(tests)}
            for key, tests in sorted(self._costs.items())
        }

    @classmethod
    def from_dict(cls, data: Any) -> Learned:
        """Return the costs from :meth:`to_dict`'s form; malformed data are left out."""
        learned = cls()
        for key, tests in data.items() if isinstance(data, dict) else ():
            for nodeid, cost in tests.items() if isinstance(tests, dict) else ():
                if isinstance(cost, dict):
                    learned.learn(key, nodeid, TestCost.from_dict(cost))
        return learned


def read_learned(folder: Path, name: str = FILE_NAME) -> Learned:
    """Return the costs of a file in ``folder``, none where it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads((folder / name).read_bytes())
        if isinstance(data, dict) and data.get("schema_version") == SCHEMA_VERSION:
            return Learned.from_dict(data.get("environments"))
    return Learned()


def add_learned(folder: Path, newer: Learned, name: str = FILE_NAME) -> None:
    """Add the costs of ``newer`` to a file in ``folder``; raises ``OSError`` with a sentence."""
    from pytest_gpumem.baseline.locks import LockError, Locks
    from pytest_gpumem.jsonfile import replace_file

    path = folder / name
    try:
        with Locks(folder, PATIENCE).holding() as draft:
            known = read_learned(folder, name)
            known.merge(newer)
            data = {"schema_version": SCHEMA_VERSION, "environments": known.to_dict()}
            replace_file(path, f"{json.dumps(data, indent=1)}\n".encode("ascii"), draft)
    except (LockError, OSError) as error:
        raise OSError(f"{path} was not written: {error}") from error


def learned_before(config: pytest.Config) -> Learned:
    """Return the data of earlier runs; all workers receive it from the controller."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        return Learned.from_dict(worker.get(INPUT))
    learned = learned_of_whole_runs(config)
    if (folder := _cache_folder(config)) is not None:
        learned.merge(read_learned(folder, IN_SHARDS))
    return learned


def learned_of_whole_runs(config: pytest.Config) -> Learned:
    """Return the data of runs without ``--gpumem-shard``, which determine shards."""
    folder = _cache_folder(config)
    return Learned() if folder is None else read_learned(folder)


def keep(config: pytest.Config, learned: Learned, *, in_shard: bool) -> str | None:
    """Store ``learned`` for later runs; return a sentence if that failed."""
    try:
        if learned and (folder := _cache_folder(config)) is not None:
            add_learned(folder, learned, IN_SHARDS if in_shard else FILE_NAME)
    except OSError as error:
        return f"what tests took is not remembered: {error}"
    return None


def _cache_folder(config: pytest.Config) -> Path | None:
    """Return the plugin's folder in pytest's cache, ``None`` where pytest has no cache."""
    cache: Any = getattr(config, "cache", None)
    folder: Path | None = cache and cache.mkdir("gpumem")
    return folder
