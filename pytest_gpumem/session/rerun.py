"""A further run of a test within the same phase of pytest's: other plugins see one run.

It is torn down and set up again, as between any two tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from _pytest.tmpdir import tmppath_result_key

from pytest_gpumem.device import Computed
from pytest_gpumem.device.device import ComputingDevice
from pytest_gpumem.simulated.distributed.worst import Taken, Worst

if TYPE_CHECKING:
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.item import MeasuredItem


class Measured(Protocol):
    """The part of the lifecycle of tests that further runs need."""

    settings: Settings
    current: MeasuredItem | None
    """The test that is measured now."""

    def begin(self, item: pytest.Item, *, computed: Computed = Computed.AT_FIRST) -> None:
        """Start measuring ``item`` on a device with the ``computed`` values."""

    def end(self) -> None:
        """Stop measuring the current test."""


class Rerun:
    """A further run of one test.

    ``begin`` begins to measure it, between the two runs; the further one is inside ``bounded``.
    """

    def __init__(
        self,
        lifecycle: Measured,
        item: Any,
        begin: Callable[[], None],
        bounded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._lifecycle = lifecycle
        self._item = item
        self._begin = begin
        self._bounded = bounded

    def set_up(self) -> None:
        """Set the test up, as pytest would for a test that follows it."""
        with self._bounded():
            self._set_up()

    def call(self) -> None:
        """Set the test up and call it."""
        if collected_error(self._item):
            self._item._excinfo.clear()
        with self._bounded():
            self._set_up()
            assert self._lifecycle.current is not None
            with self._lifecycle.current.calling():
                self._item.runtest()

    def _set_up(self) -> None:
        item = self._item
        state = item.session._setupstate
        # The teardown of tmp_path reads and removes data that the reports of the test have left.
        # Before this one, or where the user interrupts the second run, there has been no report.
        item.stash.setdefault(tmppath_result_key, {})
        state.teardown_exact(item.parent)
        item.stash.setdefault(tmppath_result_key, {})
        item._initrequest()
        self._lifecycle.end()
        self._begin()
        state.setup(item)


class WorstRank(Worst):
    """The runs of a test that requests the worst of its ranks; that of the highest peak is last."""

    def next_run(
        self, lifecycle: Measured, item: pytest.Item, error: BaseException | None
    ) -> Rerun | None:
        """Return the run of ``item`` as the next rank, ``None`` where the current one is the last.

        An ``error`` about memory is the worst rank's; a body that fails is not run again.
        """
        current = lifecycle.current
        if current is None or current.body_raised or current.measurement is None:
            return None
        failed = error is not None and not isinstance(error, pytest.fail.Exception)
        if failed or not can_run_again(item):
            return None
        assert isinstance(current.device, ComputingDevice)
        self.note(Taken(current.measurement.peak_allocated, current.device.events))
        following = self.next()
        if following is None:
            current.note(self.sentence)
            return None

        def begin() -> None:
            self.rank = following
            lifecycle.begin(item)

        return Rerun(lifecycle, item, begin)


def collected_error(item: Any) -> BaseException | None:
    """Return the exception of a unittest's body, which pytest keeps in a list of the item."""
    found = getattr(item, "_excinfo", None)
    error: BaseException | None = found[0].value if found else None
    return error


def can_run_again(item: pytest.Item) -> bool:
    """Return whether ``item`` can be set up a second time: not a plugin's own kinds of items."""
    return hasattr(item, "_initrequest")
