"""Replacement of a process whose CUDA context is lost: it leaves and runs no further test.

After an illegal access or an assertion on the device every CUDA call of the process fails
(``device/fault.py``), so tests that come later would fail for it, too.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.report.pytest_reports import LOST

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Device
    from pytest_gpumem.session.sharing import Sharing

EXIT_CODE = 70
"""The exit code of a process that leaves during a run: EX_SOFTWARE of sysexits.h."""


class Faults:
    """The handling of this process after a fault of its device."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lost = ""
        """The test in which the context was lost."""

    def look(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        device: Device,
        sharing: Sharing | None,
    ) -> None:
        """Check after a failed test whether its process can run others.

        Under MPS a fault of one client is one of all: a test that did not run alone on its device
        is a suspect, and is rerun without others.
        """
        if self._lost or (fault := device.fault()) is None:
            return
        is_worker = hasattr(self._config, "workerinput")
        if is_worker and sharing is not None and device.shares_faults and sharing.suspect():
            self._leave(item)
        self._lost = item.nodeid
        setattr(report, LOST, item.nodeid)
        consequence = "its worker is replaced" if is_worker else "no further test is run"
        sentence = f"the CUDA context of the process is lost ({fault}): {consequence}"
        report.sections.append(("gpumem", sentence))
        if not is_worker:
            item.session.shouldfail = f"{item.nodeid}: {sentence}"

    def leave_if_lost(self, item: pytest.Item) -> None:
        """End this process before ``item`` if it is a worker that can run no more tests."""
        if self._lost and hasattr(self._config, "workerinput"):
            self._leave(item)

    def _leave(self, item: pytest.Item) -> None:
        with suppress(BaseException):  # resources on the device cannot be torn down
            item.session._setupstate.teardown_exact(None)
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors would call CUDA; the driver frees the memory of the process.
        os._exit(EXIT_CODE)
