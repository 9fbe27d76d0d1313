"""The assignment of tests to GPUs: the number of machines of each kind, and their cost.

This module computes with the needs of tests; it runs no tests and imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pytest_gpumem.quoting import quoted
from pytest_gpumem.sharing.devices import CONTEXT, LEFT_FREE
from pytest_gpumem.sharing.weights import PLAN_VERSION, Shard, Weight, Weights, split
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_gpu
from pytest_gpumem.sizes import format_size

MOST_RUNNERS = 8
"""The most kinds of machines, because every subset of them is tried."""

HOUR = 3600.0


@dataclass(frozen=True)
class Rental:
    """A kind of machine that is available."""

    model: GpuModel
    price: float
    """Price of an hour, in any currency."""

    @property
    def name(self) -> str:
        """The model's name in the catalogue."""
        return self.model.name

    @property
    def memory(self) -> int:
        """Bytes for a test: all but a CUDA context and the margin of shared devices."""
        return round(self.model.total_memory * (1 - LEFT_FREE)) - CONTEXT


@dataclass(frozen=True)
class PlannedTest:
    """The known needs of one test."""

    nodeid: str
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Peak reserved bytes by runner; unknown for a runner without an entry."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds with the device to itself, by runner; unknown for a runner without an entry."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons other than memory why it does not run, by runner."""
    problem: str = ""
    """The reason why its needs are unknown."""

    def obstacle(self, runner: Rental) -> str:
        """Return why the test does not fit ``runner``; empty if it does or needs are unknown."""
        if runner.name in self.refusals:
            return self.refusals[runner.name]
        need = self.bytes.get(runner.name, 0)
        return f"needs {format_size(need)}" if need > runner.memory else ""


@dataclass(frozen=True)
class Job:
    """A machine and its tests."""

    runner: Rental
    tests: tuple[str, ...]
    seconds: float | None
    """Seconds including start-up; ``None`` if no duration is known."""

    @property
    def cost(self) -> float | None:
        """The cost in the currency of the price."""
        return None if self.seconds is None else self.seconds / HOUR * self.runner.price


@dataclass(frozen=True)
class Plan:
    """The machines for all tests."""

    runners: tuple[Rental, ...]
    tests: tuple[PlannedTest, ...]
    jobs: tuple[Job, ...]
    nowhere: tuple[PlannedTest, ...]
    """Tests that no runner can run."""
    late: tuple[str, ...]
    """Tests that take longer than the limit even on their own machine."""

    @property
    def cost(self) -> float | None:
        """The cost of all machines; ``None`` where no duration is known."""
        costs = [job.cost for job in self.jobs if job.cost is not None]
        return sum(costs) if len(costs) == len(self.jobs) else None

    @property
    def seconds(self) -> float | None:
        """The seconds until the last machine is done; ``None`` where no duration is known."""
        times = [job.seconds for job in self.jobs if job.seconds is not None]
        return max(times, default=None)

    def shards(self) -> dict[str, Any]:
        """Return the data that ``--gpumem-shard-by`` reads, with a matrix of CI jobs."""
        homes = {nodeid: job.runner.name for job in self.jobs for nodeid in job.tests}
        placed = [test for test in self.tests if test.nodeid in homes]
        weights = Weights(
            {test.nodeid: test.seconds[homes[test.nodeid]] for test in placed if test.seconds},
            {test.nodeid: test.bytes[homes[test.nodeid]] for test in placed if test.bytes},
            tuple(
                Shard(job.runner.name, job.runner.memory, job.runner.price, job.tests)
                for job in self.jobs
            ),
        )
        jobs = [
            {
                "runner": job.runner.name,
                "shard": f"{number}/{len(self.jobs)}",
                "tests": len(job.tests),
                "minutes": None if job.seconds is None else round(job.seconds / 60, 2),
            }
            for number, job in enumerate(self.jobs, 1)
        ]
        return {"schema_version": PLAN_VERSION, "matrix": {"include": jobs}, **weights.to_dict()}

    def fitting(self, runner: Rental) -> int:
        """Return how many of the tests with known needs fit ``runner``."""
        known = [test for test in self.tests if not test.problem]
        return sum(not test.obstacle(runner) for test in known)


def parse_runner(text: str) -> Rental:
    """Return the runner of ``"T4:0.35"``; raises ``ValueError`` for an unknown model or price."""
    name, colon, price = text.rpartition(":")
    if not colon or not re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9})?\s*", price):
        raise ValueError(
            f"--runner {quoted(text)} is not a GPU model and the price of an hour, like T4:0.35"
        )
    return Rental(find_gpu(name), float(price))


def make_plan(
    tests: Sequence[PlannedTest],
    runners: Sequence[Rental],
    *,
    limit: float | None = None,
    startup: float = 0.0,
) -> Plan:
    """Return the cheapest plan by which every machine ends within ``limit`` seconds.

    Each machine takes ``startup`` seconds before its first test and then runs its tests one by one.
    A test of unknown duration counts with the mean of the known ones; a test of unknown memory goes
    to the runner with most memory. Raises ``ValueError`` if no plan keeps ``limit``, or no
    duration is known.
    """
    _check(tests, runners, limit, startup)
    nowhere = [test for test in tests if all(map(test.obstacle, runners))]
    homeless = {test.nodeid for test in nowhere}
    placed = [test for test in tests if test.nodeid not in homeless]
    seconds = {runner.name: _seconds_on(runner, placed) for runner in runners}
    # Every subset of kinds is tried; without start-up time a further kind costs nothing.
    sizes = range(1, len(runners) + 1) if startup else [len(runners)]
    selections = (chosen for size in sizes for chosen in combinations(runners, size))
    found = (_jobs(placed, chosen, seconds, limit, startup) for chosen in selections)
    best = min(
        (jobs for jobs in found if jobs is not None),
        key=lambda jobs: (sum(job.cost or 0.0 for job in jobs), len(jobs)),
        default=(),
    )
    room = math.inf if limit is None else limit - startup
    late = [test for job in best for test in job.tests if seconds[job.runner.name][test] > room]
    return Plan(tuple(runners), tuple(tests), best, tuple(nowhere), tuple(late))


def _seconds_on(runner: Rental, tests: Sequence[PlannedTest]) -> dict[str, float]:
    """Return the tests' seconds on ``runner``, for unknown ones the mean of the known ones."""
    known = [test.seconds[runner.name] for test in tests if runner.name in test.seconds]
    mean = sum(known) / len(known) if known else 0.0
    return {test.nodeid: test.seconds.get(runner.name, mean) for test in tests}


def _check(
    tests: Sequence[PlannedTest], runners: Sequence[Rental], limit: float | None, startup: float
) -> None:
    names = [runner.name for runner in runners]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--runner {twice[0]} is given twice; give each model once")
    if len(runners) > MOST_RUNNERS:
        raise ValueError(f"{len(runners)} runners are given; {MOST_RUNNERS} at most can be weighed")
    if limit is None:
        return
    if limit <= startup:
        raise ValueError(
            f"machines that take {startup / 60:g} minutes to start are not done in {limit / 60:g}; "
            "give --minutes more than --startup"
        )
    if not any(test.seconds for test in tests):
        raise ValueError(
            "no test's duration is known, so the number of machines for --minutes is unknown; "
            "give a report, or --durations FILE"
        )


def _jobs(
    tests: Sequence[PlannedTest],
    runners: Sequence[Rental],
    seconds: Mapping[str, Mapping[str, float]],
    limit: float | None,
    startup: float,
) -> tuple[Job, ...] | None:
    """Return the cheapest machines for ``tests``, ``None`` if some test fits none of them."""
    homes: dict[str, list[str]] = {runner.name: [] for runner in runners}
    known = any(test.seconds for test in tests)
    for test in tests:
        fitting = [runner for runner in runners if not test.obstacle(runner)]
        if not fitting:
            return None
        if test.problem:
            home = max(fitting, key=lambda runner: (runner.memory, -runner.price))
        else:
            taken = {one: seconds[one.name][test.nodeid] if known else 1.0 for one in fitting}
            home = min(fitting, key=lambda one: (taken[one] * one.price, one.price, one.memory))
        homes[home.name].append(test.nodeid)
    return tuple(
        Job(
            runner,
            tuple(names),
            startup + sum(seconds[runner.name][name] for name in names) if known else None,
        )
        for runner in runners
        for names in _machines(homes[runner.name], seconds[runner.name], limit, startup)
    )


def _machines(
    names: Sequence[str], seconds: Mapping[str, float], limit: float | None, startup: float
) -> Iterable[Sequence[str]]:
    """Return the tests of each machine of one kind."""
    if limit is None:
        return [sorted(names)] if names else []
    room = limit - startup
    late = [[name] for name in sorted(names) if seconds[name] > room]
    rest = [Weight(name, seconds[name], 0) for name in names if seconds[name] <= room]
    count = max(math.ceil(sum(seconds[test.name] for test in rest) / room), 1)
    while True:
        # Ends at the latest with one machine for each test.
        parts = split(rest, count)
        if all(sum(seconds[name] for name in part) <= room for part in parts):
            return [*late, *(part for part in parts if part)]
        count += 1
