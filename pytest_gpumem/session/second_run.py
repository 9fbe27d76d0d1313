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
from typing import Any, cast

import pytest

from pytest_gpumem.device.computed import Computed
from pytest_gpumem.device.device import ComputingDevice, Device
from pytest_gpumem.session.rerun import Measured, Rerun, can_run_again, collected_error
from pytest_gpumem.values.errors import HostMemoryError, UnknownValueError, WorkLimitError


class _WithValues:
    """The second run of one test, for the given ``reason``.

    ``expected`` are the least seconds of computing that it takes, where all is ``computed``.
    """

    def __init__(
        self, course: Measured, item: Any, reason: str, computed: Computed, *, expected: float
    ) -> None:
        self._course = course
        self._item = item
        self._computed = computed
        self._reason = reason
        self._expected = expected
        self._limit = course.settings.sim_values_limit
        self._shown: Callable[[str], None] | None = None

    def begin(self) -> None:
        """Begin to measure on a device that has the values."""
        self._course.begin(self._item, computed=self._computed)
        if self._computed is not Computed.ALL:
            return
        device = self._device
        device.work.bound(self._limit, self._show)
        device.note(f"run again with real values on the CPU: {self._why}")

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Compute inside, within the limits of time and memory."""
        if self._computed is not Computed.ALL:
            yield
            return
        if self._expected > self._limit:
            raise WorkLimitError(
                f"{self._reason}; and computing values on the CPU takes at least "
                f"{_rounded(self._expected)}, more than {self._allowed}"
            )
        text = f"{self._item.nodeid}: run again with real values, because {self._why}"
        try:
            with progress_line(self._item.config, text) as show:
                self._shown = show
                yield
        except WorkLimitError:
            raise WorkLimitError(
                f"{self._reason}; and computing values on the CPU takes longer than {self._allowed}"
            ) from None
        except HostMemoryError as error:
            raise HostMemoryError(f"{self._reason}; and {error}") from None

    def _show(self, seconds: float) -> None:
        if self._shown is not None:
            self._shown(f": {seconds:.0f} s of at most {self._limit:g} s")

    @property
    def _why(self) -> str:
        return self._reason.partition(", which")[0]

    @property
    def _allowed(self) -> str:
        return f"the {self._limit:g} s that --gpumem-sim-values-limit allows"

    @property
    def _device(self) -> ComputingDevice:
        assert self._course.current is not None
        device = with_values(self._course.current.device)
        assert device is not None
        return device


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def second_run(course: Measured, item: pytest.Item, error: BaseException | None) -> Rerun | None:
    """Return the run that ``item`` needs after ``error``, or after none that pytest would see.

    ``None`` where the test's outcome stands.
    """
    current = course.current
    if current is None:
        return None
    device = with_values(current.device)
    computed = None if device is None else device.following
    if device is None or computed is None or not can_run_again(item):
        return None
    if computed is Computed.ALL and course.settings.sim_values != "auto":
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
    if error is not None:
        _let_go(error)
    run = _WithValues(course, item, reason, computed, expected=device.work.seconds)
    return Rerun(course, item, run.begin, run.bounded)


def _let_go(error: BaseException) -> None:
    """Free the memory that the frames of ``error`` hold: they are in cycles, and not displayed."""
    following: BaseException | None = error
    while following is not None:
        clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def with_values(device: Device) -> ComputingDevice | None:
    """Return ``device`` if it is one that the CPU can compute values for, else ``None``."""
    # Not by its class: the other one would be imported for that.
    return cast("ComputingDevice", device) if hasattr(device, "following") else None


@contextmanager
def progress_line(config: pytest.Config, text: str) -> Iterator[Callable[[str], None] | None]:
    """Show ``text`` below the current line, followed by the argument of the yielded function.

    Shows nothing, and yields ``None``, if pytest does not own the terminal: in a worker of xdist,
    where output is not captured, and with live logs.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None or not _is_free(config):
        yield None
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


def _is_free(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return (
        reporter is not None
        and not hasattr(config, "workerinput")
        and reporter.isatty
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.getoption("capture", "no") != "no"
        and not _logs_live(config)
    )


def _logs_live(config: pytest.Config) -> bool:
    if not config.pluginmanager.hasplugin("logging-plugin"):
        return False
    return config.getoption("log_cli_level", None) is not None or bool(config.getini("log_cli"))
