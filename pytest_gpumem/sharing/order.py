"""The choice of a worker's next test: the one that best fills the device beside other workers.

The gate in each worker decides when a test runs; the order only sends tests that can run at the
same time to the workers. pytest-xdist sends a worker its next test while the worker runs another
one, so every choice is made one test ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from xdist.scheduler.load import LoadScheduling
from xdist.workermanage import WorkerController

from pytest_gpumem.sharing.admission import NEEDS_NO_GPU, Need, Place


def next_test(pending: Sequence[Need], beside: Sequence[Need], capacity: int) -> int:
    """Return the position in ``pending`` of the test to run beside the tests ``beside``.

    Of the tests that fit, those of highest priority come first, of these guaranteed ones, of these
    the largest bytes x seconds. If none fits, the smallest of the first such group.
    """
    taken = sum(test.on(capacity) for test in beside)

    def worth(test: Need) -> tuple[bool, int, bool, float]:
        size = test.on(capacity)
        fits = taken + size <= capacity
        # Of tests of unknown duration, the larger ones come first.
        duration = 1.0 if test.duration is None else test.duration
        return (fits, test.priority, test.guaranteed, size * duration if fits else -size)

    worths = list(map(worth, pending))
    return worths.index(max(worths))


class MemoryScheduling(LoadScheduling):  # type: ignore[misc]  # untyped in pytest-xdist
    """pytest-xdist's ``load`` in the order of :func:`next_test`.

    ``place_of`` returns the device of a worker by the worker's id; it is called after collection.
    Tests that use a GPU go to workers with a real one, if there are any.
    """

    def __init__(self, config: pytest.Config, log: Any, place_of: Callable[[str], Place]) -> None:
        super().__init__(config, log)
        self.maxschedchunk = 1
        self._place_of = place_of

    def _send_tests(self, node: WorkerController, num: int) -> None:
        place = self._place(node)
        others = [one for one in self.nodes if one != node and self._place(one).name == place.name]
        chosen = []
        for _ in range(num):
            fitting = [index for index in self.pending if self._may_run(index, place)]
            if not fitting:
                break
            beside = [self.node2pending[one][-1] for one in others if self.node2pending[one]]
            at = next_test(
                [self._need(index, place) for index in fitting],
                [self._need(index, place) for index in beside],
                place.capacity,
            )
            self.pending.remove(fitting[at])
            chosen.append(fitting[at])
            self.node2pending[node].append(fitting[at])
        if chosen:
            node.send_runtest_some(chosen)

    def _place(self, node: WorkerController) -> Place:
        return self._place_of(node.gateway.id)

    def _need(self, index: int, place: Place) -> Need:
        assert self.collection is not None
        return place.needs.get(self.collection[index], NEEDS_NO_GPU)

    def _may_run(self, index: int, place: Place) -> bool:
        """Return whether the test may run on ``place``: a real device, if any worker has one."""
        assert self.collection is not None
        nodeid = self.collection[index]
        places = map(self._place, self.nodes)
        return place.real or not any(one.real and nodeid in one.needs for one in places)
