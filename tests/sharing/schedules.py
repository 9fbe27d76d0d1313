"""Random schedules of a shared GPU, simulated against the ledger in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.sharing.admission import PATIENCE, Budget, Need
from pytest_gpumem.sharing.ledger import Ledger

CAPACITY = 1000
STEPS = 7
"""Between the lowest rank of a planned test and the highest: priorities 0 to 5, and a guarantee."""


@dataclass(frozen=True)
class PlannedTest:
    """The need, duration and priority of one test."""

    need: int
    """Bytes, those of its fixtures with it."""
    takes: float
    expected: float | None = None
    fixtures: int = 0
    """Bytes of fixtures that the test leaves for those after it."""
    exclusive: bool = False
    priority: int = 0
    guaranteed: bool = True


@dataclass
class Worker:
    """A worker that runs its tests one after the other, as workers of pytest-xdist do."""

    number: int
    tests: deque[PlannedTest]
    fixtures: int = 0
    asked: int | None = None
    ends: float | None = None
    asked_at: float = 0.0
    waits: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    """The longest permitted wait for each of ``waits``."""


class Simulation:
    """Workers, their tests and memory of other programs, on one device ``gpu``."""

    def __init__(self, folder: Path, plans: Iterable[list[PlannedTest]], context: int = 0) -> None:
        self.now = 0.0
        self.plans = list(plans)
        self.foreign = 0
        self.ledger = Ledger(folder, clock=lambda: self.now)
        self.workers: list[Worker] = []
        self.asked: list[tuple[float, float]] = []
        """The time at which each test asked, and its duration."""
        for position, plan in enumerate(self.plans):
            number = self.ledger.join("run", f"gw{position}")
            self.ledger.hold(number, "gpu", context=context, fixtures=0)
            self.workers.append(Worker(number, deque(plan)))

    @property
    def is_over(self) -> bool:
        return not any(worker.tests for worker in self.workers)

    def play(self) -> None:
        """Advance every worker as far as possible, then the time to the end of the next test."""
        while not self.is_over:
            self.ask()
            ends = [worker.ends for worker in self.workers if worker.ends is not None]
            assert ends, "nothing runs and nothing may run: a deadlock"
            self.pass_time(min(ends))

    def ask(self) -> None:
        """Have every idle worker ask for its next test, until no answer changes."""
        changed = True
        while changed:
            answers = [self._go_on(worker) for worker in self.workers]
            changed = any(answers)

    def pass_time(self, to: float) -> None:
        self.now = to
        for worker in self.workers:
            if worker.ends is not None and worker.ends <= to:
                self._end(worker)

    def _go_on(self, worker: Worker) -> bool:
        if worker.ends is not None or not worker.tests:
            return False
        test = worker.tests[0]
        is_new = worker.asked is None
        if worker.asked is None:
            worker.asked_at = self.now
            self.asked.append((self.now, test.takes))
            need = Need(
                test.need,
                "max",
                duration=test.expected,
                exclusive=test.exclusive,
                priority=test.priority,
                guaranteed=test.guaranteed,
            )
            above_held = {"gpu": test.need - min(worker.fixtures, test.need)}
            worker.asked = self.ledger.ask(worker.number, "test", above_held, need)
        answer = self.ledger.try_grant(worker.asked, self._devices())
        if answer.granted:
            worker.ends = self.now + test.takes
            worker.waits.append(self.now - worker.asked_at)
            worker.bounds.append(self._bound(worker))
            self.check_capacity()
            return True
        if answer.must_tear_down and worker.fixtures:
            self._hold(worker, 0)
            self.ledger.ask_again(worker.asked, {"gpu": test.need})
            return True
        return is_new

    def _bound(self, worker: Worker) -> float:
        """Return the longest wait of a test, as docs/sharing.md states it.

        Until it comes as soon as any other by its rank, tests that ask may go before it; all of
        them and those that were there take what they take, one after the other.
        """
        ranks = [(test.priority, test.guaranteed) for plan in self.plans for test in plan]
        ranked = worker.asked_at + (STEPS * PATIENCE if len(set(ranks)) > 1 else 0)
        return sum(takes for asked, takes in self.asked if asked <= ranked)

    def _end(self, worker: Worker) -> None:
        test = worker.tests.popleft()
        assert worker.asked is not None
        # pytest tears all fixtures down after a worker's last test.
        self._hold(worker, test.fixtures if worker.tests else 0)
        self.ledger.release(worker.asked)
        worker.asked = worker.ends = None

    def _hold(self, worker: Worker, fixtures: int) -> None:
        worker.fixtures = fixtures
        held = self._devices()["gpu"]
        state = self.ledger.state({"gpu": held}).devices["gpu"]
        self.ledger.hold(
            worker.number, "gpu", context=state.contexts[worker.number], fixtures=fixtures
        )

    def _devices(self) -> dict[str, Budget]:
        return {"gpu": Budget(CAPACITY, foreign=self.foreign)}

    def check_capacity(self) -> None:
        state = self.ledger.state(self._devices())
        running = list(state.running)
        assert state.devices["gpu"].free("gpu", running) >= 0
        if any(request.exclusive for request in running):
            assert len(running) == 1
