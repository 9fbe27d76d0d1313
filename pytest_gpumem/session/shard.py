"""``--gpumem-shard K/N``: of all selected tests, those of one machine out of N."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import pytest

from pytest_gpumem.baseline.store import BaselineError, read_folder
from pytest_gpumem.marker import Expectation
from pytest_gpumem.options import Settings
from pytest_gpumem.report.pytest_reports import without_group
from pytest_gpumem.session.results import Results
from pytest_gpumem.sharing.learned import WEIGHTS, learned_of_whole_runs
from pytest_gpumem.sharing.weights import (
    OF_PYTEST_SPLIT,
    Shard,
    Weight,
    Weights,
    fingerprint,
    read_weights,
    split,
)


class Sharding:
    """The deselection of other machines' tests, after all other deselection."""

    def __init__(
        self, results: Results, expectation: Callable[[pytest.Item], Expectation | None]
    ) -> None:
        config, settings = results.config, results.settings
        assert settings.shard is not None
        self._number, self._count = settings.shard
        self._shares = settings.share
        self._results = results
        self._expectation = expectation
        worker = getattr(config, "workerinput", None)
        try:
            self.weights = (
                Weights.from_dict(worker[WEIGHTS]) if worker else _weights(config, settings)
            )
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        count = len(self.weights.shards)
        if count and count != self._count:
            raise pytest.UsageError(
                f"--gpumem-shard={self._number}/{self._count}: {settings.shard_by} has {count} "
                f"shards; write {min(self._number, count)}/{count} or plan anew"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Remove the tests of other machines."""
        result = yield
        parts = self._parts(items)
        own = set(parts[self._number - 1])
        left = [item for item in items if _unit(item) in own]
        others = [item for item in items if _unit(item) not in own]
        self._results.shard = self._sentence(parts, left, len(items))
        items[:] = left
        if others:
            config.hook.pytest_deselected(items=others)
        return result

    def _parts(self, items: Sequence[pytest.Item]) -> list[list[str]]:
        units: dict[str, list[pytest.Item]] = {}
        for item in items:
            units.setdefault(_unit(item), []).append(item)
        weights = [self._weight(name, together) for name, together in units.items()]
        if self.weights.shards:
            on_gpu = {name for name, found in units.items() if any(map(self._expectation, found))}
            return planned(self.weights.shards, weights, on_gpu)
        return split(weights, self._count)

    def _weight(self, name: str, items: Sequence[pytest.Item]) -> Weight:
        """Return the weight of tests that run one after the other."""
        nodeids = [without_group(item.nodeid) for item in items]
        seconds = [self.weights.seconds[one] for one in nodeids if one in self.weights.seconds]
        sizes = [self._size(item, nodeid) for item, nodeid in zip(items, nodeids, strict=True)]
        return Weight(
            name,
            sum(seconds) if seconds else None,
            max((size for size in sizes if size is not None), default=None),
        )

    def _size(self, item: pytest.Item, nodeid: str) -> int | None:
        """Return the bytes that a test needs on a shared device."""
        expectation = self._expectation(item) if self._shares else None
        if expectation is None:
            return 0
        declared = expectation.max if expectation.max_reserved is None else expectation.max_reserved
        return self.weights.bytes.get(nodeid) if declared is None else declared

    def _sentence(
        self, parts: Sequence[Sequence[str]], left: Sequence[pytest.Item], count: int
    ) -> str:
        known = [self.weights.seconds.get(without_group(item.nodeid)) for item in left]
        seconds = [one for one in known if one is not None]
        times = f", {len(seconds)} of them known to take {sum(seconds):.1f} s" if seconds else ""
        return (
            f"shard {self._number}/{self._count}: {len(left)} of {count} tests{times}; cut "
            f"{fingerprint(parts)}, which is the same on every machine or tests are left out"
        )


def planned(
    shards: Sequence[Shard], tests: Sequence[Weight], on_gpu: Collection[str]
) -> list[list[str]]:
    """Return the ``tests`` of each machine of the plan.

    Tests that are not in the plan go to the machines with most memory if they run ``on_gpu``, else
    to the cheapest ones.
    """
    names = {test.name for test in tests}
    parts = [sorted(names & set(shard.tests)) for shard in shards]
    known = {name for part in parts for name in part}
    most = max(shard.memory for shard in shards)
    least = min(shard.price for shard in shards)
    pairs = list(zip(shards, parts, strict=True))
    for is_on_gpu, takers in (
        (True, [part for shard, part in pairs if shard.memory == most]),
        (False, [part for shard, part in pairs if shard.price == least]),
    ):
        missing = [t for t in tests if t.name not in known and (t.name in on_gpu) == is_on_gpu]
        for part, further in zip(takers, split(missing, len(takers)), strict=True):
            part += further
    return parts


def _weights(config: pytest.Config, settings: Settings) -> Weights:
    """Return times and sizes of tests: from the given file, else from cache and baselines."""
    if settings.shard_by is not None:
        return read_weights(settings.shard_by)
    seconds: dict[str, float] = {}
    bytes_: dict[str, int] = {}
    own = config.rootpath / OF_PYTEST_SPLIT
    if own.is_file():
        seconds.update(read_weights(own).seconds)
    if settings.baselines.is_dir():
        try:
            for module, file in read_folder(settings.baselines):
                for name, entry in file.tests.items():
                    nodeid = f"{module}::{name}"
                    bytes_[nodeid] = max(bytes_.get(nodeid, 0), entry.peak_reserved)
        except BaselineError:
            pass  # reported where tests are judged
    learned = learned_of_whole_runs(config)
    for _, nodeid, _ in learned:
        cost = learned.anywhere(nodeid)
        if cost.seconds is not None:
            seconds[nodeid] = cost.seconds
        if cost.reserved is not None:
            bytes_[nodeid] = cost.reserved
    return Weights(seconds, bytes_)


def _unit(item: Any) -> str:
    """Return the name of a unit that is not split: a test, or a group of pytest-xdist."""
    group = item.get_closest_marker("xdist_group")
    if group is None:
        return without_group(item.nodeid)
    name = group.args[0] if group.args else group.kwargs.get("name", "default")
    return f"@{name}"
