"""A further run of a test within the same phase of pytest's: other plugins see one run.

It is torn down and set up again, as between any two tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from _pytest.tmpdir import tmppath_result_key

from pytest_gpumem.device.computed import Computed

if TYPE_CHECKING:
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.item import MeasuredItem


class Measured(Protocol):
    """The part of the course of tests that further runs need."""

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
        course: Measured,
        item: Any,
        begin: Callable[[], None],
        bounded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._course = course
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
            assert self._course.current is not None
            with self._course.current.calling():
                self._item.runtest()

    def _set_up(self) -> None:
        item = self._item
        state = item.session._setupstate
        _expect_results(item)
        state.teardown_exact(item.parent)
        _expect_results(item)
        item._initrequest()
        self._course.end()
        self._begin()
        state.setup(item)


def collected_error(item: Any) -> BaseException | None:
    """Return the exception of a unittest's body, which pytest keeps in a list of the item."""
    found = getattr(item, "_excinfo", None)
    error: BaseException | None = found[0].value if found else None
    return error


def can_run_again(item: pytest.Item) -> bool:
    """Return whether ``item`` can be set up a second time: not a plugin's own kinds of items."""
    return hasattr(item, "_initrequest")


def _expect_results(item: pytest.Item) -> None:
    """Allow ``tmp_path`` to be torn down before a phase has been reported.

    Its teardown reads and removes data that the reports of the test have left; after this one,
    or where the user interrupts the second run, there has been none.
    """
    item.stash.setdefault(tmppath_result_key, {})
