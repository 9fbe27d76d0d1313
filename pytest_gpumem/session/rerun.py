"""A further run of a test within the same phase of pytest's: other plugins see one run.

It is torn down and set up again, as between any two tests. A test runs again

- on shared devices, where memory was crowded out or lent to another test;
- as the next of its ranks, where it requests the worst of them;
- where it needs values, which the CPU computes: a simulated device has shapes, and the dry one
  copied values. Where control flow, a shape or an assertion depends on a value that it does not
  have, the test runs on a device of the same model that has values too. On the dry device small
  values come first, and all of them in a third run. All values are computed for at most
  ``--gpumem-sim-values-limit``; where the run before, as far as it came, needed more than that,
  the second one does not begin. Fixtures that tests share are set up anew if they depend on the
  device, as between any two devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from _pytest.tmpdir import tmppath_result_key

from pytest_gpumem.device import Computed
from pytest_gpumem.device.device import ComputingDevice
from pytest_gpumem.simulated.distributed.worst import Taken, Worst
from pytest_gpumem.values.errors import HostMemoryError, UnknownValueError, WorkLimitError

if TYPE_CHECKING:
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.item import MeasuredItem


class Measured(Protocol):
    """The part of the lifecycle of tests that further runs need."""

    settings: Settings
    current: MeasuredItem | None

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


class _RunWithValues:
    """The second run of one test, for the given ``reason``.

    ``expected`` are the least seconds of computing that it takes, where all is ``computed``.
    """

    def __init__(
        self,
        lifecycle: Measured,
        item: pytest.Item,
        reason: str,
        computed: Computed,
        *,
        expected: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._item = item
        self._reason = reason
        self._computed = computed
        self._expected = expected
        self._limit = lifecycle.settings.sim_values_limit
        self._show: Callable[[str], None] = lambda more: None

    def begin(self) -> None:
        """Begin to measure on a device that has the values."""
        self._lifecycle.begin(self._item, computed=self._computed)
        if self._computed is Computed.ALL:
            assert self._lifecycle.current is not None
            device, limit = self._lifecycle.current.device, self._limit
            assert isinstance(device, ComputingDevice)
            device.work.bound(limit, lambda s: self._show(f": {s:.0f} s of at most {limit:g} s"))
            device.note(f"run again with real values on the CPU: {self._short_reason}")

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Compute inside, within the limits of time and memory."""
        if self._computed is not Computed.ALL:
            yield
            return
        too_long = f"{self._reason}; and computing values on the CPU takes"
        allowed = f"the {self._limit:g} s that --gpumem-sim-values-limit allows"
        if self._expected > self._limit:
            least = f"{self._expected:,.{1 if self._expected < 10 else 0}f} s"
            raise WorkLimitError(f"{too_long} at least {least}, more than {allowed}")
        text = f"{self._item.nodeid}: run again with real values, because {self._short_reason}"
        try:
            with progress_line(self._item.config, text) as self._show:
                yield
        except WorkLimitError:
            raise WorkLimitError(f"{too_long} longer than {allowed}") from None
        except HostMemoryError as error:
            raise HostMemoryError(f"{self._reason}; and {error}") from None

    @property
    def _short_reason(self) -> str:
        return self._reason.partition(", which")[0]


def run_with_values(
    lifecycle: Measured, item: pytest.Item, error: BaseException | None
) -> Rerun | None:
    """Return the run with values that ``item`` needs after ``error``, ``None`` for none."""
    current = lifecycle.current
    if current is None or not isinstance(current.device, ComputingDevice):
        return None
    device = current.device
    computed = device.following
    if computed is None or not can_run_again(item):
        return None
    if computed is Computed.ALL and lifecycle.settings.sim_values != "auto":
        return None
    error = collected_error(item) if error is None else error
    failed = isinstance(error, (Exception, pytest.fail.Exception)) and current.body_raised
    if isinstance(error, UnknownValueError):
        reason = str(error)
    elif device.decided is not None:
        reason = device.decided
    elif failed and device.made_up:
        reason = "it failed after it read a value that is not computed"
    else:
        return None
    following = error
    while following is not None:  # their frames hold memory, in cycles, and are not displayed
        clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__
    run = _RunWithValues(lifecycle, item, reason, computed, expected=device.work.seconds)
    return Rerun(lifecycle, item, run.begin, run.bounded)


@contextmanager
def progress_line(config: pytest.Config, text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` below the current line, followed by the argument of the yielded function.

    Shows nothing if pytest does not own the terminal: in a worker of xdist, where output is not
    captured, and with live logs.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None or not _owns_terminal(config):
        yield lambda more: None
        return
    writer = config.get_terminal_writer()
    column, width = writer.width_of_current_line, writer.fullwidth

    def write(control: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(control)
            sys.stdout.flush()

    def show(more: str) -> None:
        shown = f"{text}{more}"[: width - 1]
        write(f"\r\x1b[2K{shown}")

    write("\n")
    show("")
    try:
        yield show
    finally:
        write(f"\r\x1b[2K\x1b[A\x1b[{column + 1}G")


def _owns_terminal(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    logs_live = config.pluginmanager.hasplugin("logging-plugin") and (
        config.getoption("log_cli_level", None) is not None or config.getini("log_cli")
    )
    return (
        reporter is not None
        and not hasattr(config, "workerinput")
        and reporter.isatty
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.getoption("capture", "no") != "no"
        and not logs_live
    )


def collected_error(item: Any) -> BaseException | None:
    """Return the exception of a unittest's body, which pytest keeps in a list of the item."""
    found = getattr(item, "_excinfo", None)
    error: BaseException | None = found[0].value if found else None
    return error


def can_run_again(item: pytest.Item) -> bool:
    """Return whether ``item`` can be set up a second time: not a plugin's own kinds of items."""
    return hasattr(item, "_initrequest")
