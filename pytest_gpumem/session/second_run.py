"""A test that needs values is run a second time, where the CPU computes them.

A simulated device knows shapes. Where control flow, a shape or an assertion depends on a value that
it does not have, the test is torn down and set up again on a device of the same model that has
values too, within the same phase of pytest's: other plugins see one run. Fixtures that tests share
are set up anew if they depend on the device, as between any two devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from _pytest.tmpdir import tmppath_result_key

from pytest_gpumem.simulated.errors import HostMemoryError, UnknownValueError

if TYPE_CHECKING:
    from pytest_gpumem.session.session import GpumemSession


class SecondRun:
    """The second run of one test."""

    def __init__(self, session: GpumemSession, item: Any, reason: str) -> None:
        self._session = session
        self._item = item
        self._reason = reason

    def set_up(self) -> None:
        """Set the test up, as pytest would for a test that follows it."""
        from pytest_gpumem.device.simulated import SimulatedDevice

        session, item = self._session, self._item
        state = item.session._setupstate
        _expect_results(item)
        state.teardown_exact(item.parent)
        _expect_results(item)
        item._initrequest()
        session.end()
        session.begin(item, real_values=True)
        assert session.current is not None
        assert isinstance(session.current.device, SimulatedDevice)
        why = self._reason.partition(", which")[0]
        session.current.device.note(f"run again with real values on the CPU: {why}")
        try:
            state.setup(item)
        except HostMemoryError as error:
            raise self._too_large(error) from None

    def call(self) -> None:
        """Set the test up and call it."""
        if _collected(self._item):
            self._item._excinfo.clear()
        self.set_up()
        assert self._session.current is not None
        try:
            with self._session.current.calling():
                self._item.runtest()
        except HostMemoryError as error:
            raise self._too_large(error) from None

    def _too_large(self, error: HostMemoryError) -> HostMemoryError:
        return HostMemoryError(f"{self._reason}; and {error}")


def second_run(
    session: GpumemSession, item: pytest.Item, error: BaseException | None
) -> SecondRun | None:
    """Return the run that ``item`` needs after ``error``, or after none that pytest would see.

    ``None`` where what the test did stands.
    """
    current = session.current
    if current is None:
        return None
    # Not before: an unmarked test must not import torch.
    from pytest_gpumem.device.simulated import SimulatedDevice

    if (
        not isinstance(current.device, SimulatedDevice)
        or current.device.has_values
        or session.settings.sim_values != "auto"
        or not hasattr(item, "_initrequest")
    ):
        return None
    error = _collected(item) if error is None else error
    if isinstance(error, UnknownValueError):
        return SecondRun(session, item, str(error))
    failed = isinstance(error, (Exception, pytest.fail.Exception)) and current.body_raised
    if failed and current.device.made_up:
        return SecondRun(session, item, "it failed after it read a value that shapes do not have")
    return None


def _collected(item: Any) -> BaseException | None:
    """What a unittest's body raised: it reaches pytest in a list of the item's."""
    found = getattr(item, "_excinfo", None)
    error: BaseException | None = found[0].value if found else None
    return error


def _expect_results(item: pytest.Item) -> None:
    """Let ``tmp_path`` be torn down before a phase has been reported.

    Its teardown reads what the reports of the test have left, and takes it away; after this one,
    or where the user interrupts the second run, there has been none.
    """
    item.stash.setdefault(tmppath_result_key, {})
