"""A second run of a test that needs values, which the CPU computes.

A simulated device has shapes, and the dry one copied values. Where control flow, a shape or
an assertion depends on a value that it does not have, the test is torn down and set up again on a
device of the same model that has values too, within the same phase of pytest's: other plugins see
one run. On the dry device small values come first, and all of them in a third run. Fixtures that
tests share are set up anew if they depend on the device, as between any two devices.

All values are computed for at most ``--gpumem-sim-values-limit``. Where the run before, as
far as it came, needed more than that, the second one does not begin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames

import pytest

from pytest_gpumem.device import Computed
from pytest_gpumem.device.device import ComputingDevice
from pytest_gpumem.session.rerun import Measured, Rerun, can_run_again, collected_error
from pytest_gpumem.values.errors import HostMemoryError, UnknownValueError, WorkLimitError


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


def second_run(lifecycle: Measured, item: pytest.Item, error: BaseException | None) -> Rerun | None:
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
