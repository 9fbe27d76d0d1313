"""A further run of a test within one phase of pytest: other plugins see one run.

The test is torn down and set up again, as between any two tests. It runs again

- on shared devices, if other processes used its memory or it was lent to another test;
- as the next rank, if it requests the worst of its ranks;
- if it needs tensor values: a simulated device has only shapes, the dry one only copied values.
  If control flow, a shape or an assertion depends on a missing value, the test runs on a device of
  the same model that computes values on the CPU. The dry device first computes small tensors, and
  all of them in a third run. Computing all values is limited by ``--gpumem-sim-values-limit``; if
  the work that the earlier run counted already exceeds the limit, no second run begins. Shared
  fixtures that depend on the device are set up again, as for any change of device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.device import ComputingDevice, Device
from pytest_gpumem.simulated.distributed.worst import RankPeak, Worst
from pytest_gpumem.values.errors import HostMemoryError, WorkLimitError

if TYPE_CHECKING:
    from pytest_gpumem.session.item import MeasuredItem


class Rerun(NamedTuple):
    """A further run of one test."""

    begin: Callable[[], object]
    """Function that starts its measurement, called between the two runs."""
    bounded: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager around its set-up and call."""


class WorstRank(Worst):
    """The runs of a test that requests the worst of its ranks; the highest peak's run is last."""

    def goes_on(self, current: MeasuredItem, error: BaseException | None) -> bool:
        """Return whether the test runs again, as the next :attr:`rank`.

        An ``error`` about memory makes this rank the worst one; a body that fails is not run again.
        """
        failed = error is not None and not isinstance(error, pytest.fail.Exception)
        if failed or current.body_raised or current.measurement is None:
            return False
        if not can_run_again(current.item):
            return False
        assert isinstance(current.device, ComputingDevice)
        self.note(RankPeak(current.measurement.peak_allocated, current.device.events_hash))
        following = self.next()
        if following is None:
            current.note(self.sentence)
            return False
        self.rank = following
        return True


def run_with_values(
    current: MeasuredItem, error: BaseException | None, begin: Callable[[ValueLevel], Device]
) -> Rerun | None:
    """Return the run with values that a test needs after ``error``, ``None`` if it needs none.

    ``begin`` starts its measurement on a device that computes values of the given level.
    """
    device, item, settings = current.device, current.item, current.settings
    if not isinstance(device, ComputingDevice):
        return None
    computed = device.next_level
    if computed is None or not can_run_again(item):
        return None
    if computed is ValueLevel.ALL and settings.sim_values != "auto":
        return None
    error = collected_error(item) if error is None else error
    if isinstance(error, WorkLimitError):
        return None  # that run would take too long, and has not begun
    failed = isinstance(error, (Exception, pytest.fail.Exception)) and current.body_raised
    reason = device.reason_to_rerun(error, failed=failed)
    if reason is None:
        return None
    following = error
    while following is not None:  # frames of the exceptions hold memory; they are not displayed
        clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__
    if computed is not ValueLevel.ALL:
        return Rerun(lambda: begin(computed))
    return _with_all_values(item, reason, begin, settings.sim_values_limit, device.work.seconds)


def _with_all_values(
    item: pytest.Item,
    reason: str,
    begin: Callable[[ValueLevel], Device],
    limit: float,
    expected: float,
) -> Rerun:
    """Return the run that computes for at most ``limit`` seconds; it takes ``expected`` or more."""
    in_short = reason.partition(", which")[0]
    shown: Callable[[str], None] | None = None

    def show(seconds: float) -> None:
        if shown is not None:
            shown(f": {seconds:.0f} s of at most {limit:g} s")

    def begin_computing() -> None:
        device = begin(ValueLevel.ALL)
        assert isinstance(device, ComputingDevice)
        device.work.bound(limit, show)
        device.note(f"run again with real values on the CPU: {in_short}")

    @contextmanager
    def bounded() -> Iterator[None]:
        nonlocal shown
        too_long = f"{reason}; and computing values on the CPU takes"
        allowed = f"the {limit:g} s that --gpumem-sim-values-limit allows"
        if expected > limit:
            least = f"{expected:,.{1 if expected < 10 else 0}f} s"
            raise WorkLimitError(f"{too_long} at least {least}, more than {allowed}")
        text = f"{item.nodeid}: run again with real values, because {in_short}"
        try:
            with progress_line(item.config, text) as shown:
                yield
        except WorkLimitError:
            raise WorkLimitError(f"{too_long} longer than {allowed}") from None
        except HostMemoryError as error:
            raise HostMemoryError(f"{reason}; and {error}") from None

    return Rerun(begin_computing, bounded)


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
