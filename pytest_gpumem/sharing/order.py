"""Which test a worker gets next: the one that fills the device best beside those of the others.

The gate in each worker decides when a test runs; the order only sees to it that tests which can
run beside each other come at the same time. pytest-xdist sends a worker its next test while it
still runs the one before, so every choice is made one test ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdist.scheduler.load import LoadScheduling

from pytest_gpumem.sharing.need import NO_MEMORY, Need

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController

USUAL_DURATION = 1.0
"""Seconds of a test whose duration nobody knows: among those, the larger ones come first."""


def next_test(pending: Sequence[Need], beside: Sequence[Need], capacity: int) -> int:
    """Return the position in ``pending`` of the test to run beside those that others have.

    The most important first; of these, what takes the largest part of device and time and still
    fits; where nothing fits, what needs least. Tests without GPU memory fill the gaps.
    """
    taken = sum(test.on(capacity) for test in beside)

    def worth(position: int) -> tuple[bool, int, bool, float]:
        test = pending[position]
        size = test.on(capacity)
        fits = taken + size <= capacity
        duration = USUAL_DURATION if test.duration is None else test.duration
        return (fits, test.priority, test.guaranteed, size * duration if fits else -size)

    return max(range(len(pending)), key=worth)


class MemoryScheduling(LoadScheduling):  # type: ignore[misc]  # untyped in pytest-xdist
    """pytest-xdist's ``load`` in the order of :func:`next_test`.

    ``plan`` is asked once, when everything has been collected: what is known of the tests by id,
    and the bytes of the device that they share.
    """

    def __init__(
        self,
        config: pytest.Config,
        log: Any,
        plan: Callable[[], tuple[Mapping[str, Need], int]],
    ) -> None:
        super().__init__(config, log)
        self.maxschedchunk = 1
        self._plan = plan
        self._tests: list[Need] = []
        self._capacity = 0

    def _send_tests(self, node: WorkerController, num: int) -> None:
        if not self._tests:
            assert self.collection is not None
            known, self._capacity = self._plan()
            self._tests = [known.get(nodeid, NO_MEMORY) for nodeid in self.collection]
        chosen = []
        for _ in range(min(num, len(self.pending))):
            others = [
                tests[-1] for one, tests in self.node2pending.items() if tests and one != node
            ]
            at = next_test(
                [self._tests[index] for index in self.pending],
                [self._tests[index] for index in others],
                self._capacity,
            )
            chosen.append(self.pending.pop(at))
            self.node2pending[node].append(chosen[-1])
        if chosen:
            node.send_runtest_some(chosen)
