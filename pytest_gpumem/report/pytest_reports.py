"""Data attached to pytest's reports, from the process of a test to the reporting one."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.report.record import TestRecord

HARMLESS = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes of a run in which nothing failed."""

ATTRIBUTE = "gpumem"
"""Attribute of a test's final call report: its record as builtin types, for pytest-xdist."""

SENTENCE = "gpumem_sentence"
"""Attribute of a test's report: a failure that another process or the device caused."""

ARGUMENTS = "gpumem_arguments"
"""Key of a pytest-xdist worker's input: pytest's arguments."""

UNSIMULATED = "gpumem_unsimulated"
"""Attribute of a test's report: the reason why a simulated device cannot run it."""

UNDESCRIBED = "gpumem_undescribed"
"""Attribute of such a report: the name of a kernel without a description."""

LOST = "gpumem_lost"
"""Attribute of a test's report: the test after which its process exits."""

RESCHEDULED = "gpumem_rescheduled"
"""Attribute of a crash's report: the reason why the test runs again."""

SKIPPED_AT_IMPORT = "gpumem_skipped_at_import"
"""Attribute of a test to be measured: its skip condition was evaluated at import."""

FAILED_WITHOUT_GPU = "gpumem_failed_without_gpu"
"""Attribute of the report of a test that is not measured: it failed because there is no GPU."""

BROKEN_PLUGINS = "gpumem_broken_plugins"
"""Attribute of a test's report: sentences on errors of other plugins."""


_OWN = f"{__name__.partition('.')[0]}."


def hide_own_frames() -> None:
    """End tracebacks in the user's code: pytest omits modules with ``__tracebackhide__``."""
    # Copied, because another thread may import at the same time; values may have any type.
    for name, module in sys.modules.copy().items():
        if isinstance(name, str) and name.startswith(_OWN) and isinstance(module, ModuleType):
            vars(module)["__tracebackhide__"] = True


def leave_the_sentence(item: pytest.Item, report: pytest.TestReport, error: BaseException) -> None:
    """Show a failure that is a sentence of this plugin at the test's line, and add no other line.

    If every frame is hidden, as in a set-up that does not reach the user's code, pytest adds a line
    on how to show them; and it names the innermost frame that is not hidden.
    """
    if not isinstance(error, pytest.fail.Exception) or error.pytrace:
        return
    for traceback, *_ in getattr(report.longrepr, "chain", ()):
        traceback.extraline = None
    crash = getattr(report.longrepr, "reprcrash", None)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    raising = [name for name in names if not name.startswith("_pytest.")][-1:]
    if crash is not None and any(name.startswith(_OWN) for name in raising):
        crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1


_HOW_TO_GET_VALUES = (
    "mark the test with @pytest.mark.gpumem, so that values are computed where it needs them, or "
    "run with --gpumem-sim-values=always"
)


def skip_unsimulated(
    item: pytest.Item, report: pytest.TestReport, error: BaseException, *, unmeasured: bool
) -> None:
    """Turn ``report`` into that of a skipped test if ``error`` is an error of the simulation.

    The test did not fail, because its code may be right. For an ``unmeasured`` test, which does not
    run again with values, the text explains how to get values.
    """
    from pytest_gpumem.values import errors

    if not isinstance(error, errors.SimulationError):
        return
    path, line, _ = item.location
    sentence = str(error)
    if unmeasured and isinstance(error, errors.UnknownValueError):
        sentence = f"{sentence}; {_HOW_TO_GET_VALUES}"
    report.outcome = "skipped"
    report.longrepr = (path, (line or 0) + 1, f"Skipped: {sentence}")
    vars(report).pop("wasxfail", None)
    setattr(report, UNSIMULATED, sentence)
    if isinstance(error, errors.UndescribedKernelError):
        setattr(report, UNDESCRIBED, error.kernel)


def with_outcome(record: TestRecord, report: pytest.TestReport) -> TestRecord | None:
    """Return ``record`` with pytest's outcome, ``None`` where the test was skipped."""
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure:
        return None
    words = {"passed": "xpassed", "skipped": "xfailed"} if expected_failure else {}
    return replace(record, outcome=words.get(report.outcome, report.outcome))


def without_group(nodeid: str) -> str:
    """Return ``nodeid`` without the ``@group`` that ``--dist loadgroup`` appends."""
    path, separator, name = nodeid.partition("::")
    return path + separator + re.sub(r"@[^@\]]*$", "", name)
