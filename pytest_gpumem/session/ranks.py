"""Runs of a test that requests the worst of its ranks: several of them, one after the other.

They are within the same phase of pytest's, so that other plugins see one run. The rank with the
highest peak runs last, and is judged.
"""

from __future__ import annotations

import pytest

from pytest_gpumem.device.dry import DryDevice
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.session.item import MeasuredItem
from pytest_gpumem.session.rerun import Measured, Rerun, can_run_again
from pytest_gpumem.simulated.distributed.worst import Taken, Worst


class WorstOfTest(Worst):
    """The ranks of a test that have run, and the next one."""

    def next_run(
        self, course: Measured, item: pytest.Item, error: BaseException | None
    ) -> Rerun | None:
        """Return the run of ``item`` as the next rank, ``None`` where the current one is the last.

        An ``error`` about memory is the worst rank's; a body that fails is not run again.
        """
        current = course.current
        if current is None or current.body_raised or current.measurement is None:
            return None
        failed = error is not None and not isinstance(error, pytest.fail.Exception)
        if failed or not can_run_again(item):
            return None
        self.note(Taken(current.measurement.peak_allocated, _device(current).events))
        rank = self.next()
        if rank is None:
            current.note(self.sentence)
            return None
        following = rank

        def begin() -> None:
            self.rank = following
            course.begin(item)

        return Rerun(course, item, begin)


def _device(current: MeasuredItem) -> SimulatedDevice | DryDevice:
    from pytest_gpumem.device.dry import DryDevice
    from pytest_gpumem.device.simulated import SimulatedDevice

    assert isinstance(current.device, SimulatedDevice | DryDevice)
    return current.device
