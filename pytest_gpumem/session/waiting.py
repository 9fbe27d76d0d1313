"""Terminal lines on tests that wait for memory, and on the processes that hold it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from pytest_gpumem.sharing.database import SharingError, default_folder
from pytest_gpumem.sharing.gate import holding
from pytest_gpumem.sharing.ledger import FILE_NAME, Ledger, State
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import pytest

REPORTED_AT = (5.0, 60.0, 600.0)
"""Seconds of waiting after which a line reports it, with the holders."""
LOOKED_EVERY = 1.0
"""Seconds between the controller's checks of its workers' waits."""


class Waiting:
    """The reports on waiting tests, where this process has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: dict[str, int] = {}
        """The number of lines by test."""

    def report(self, nodeid: str, waited: float, holders: str) -> None:
        """Take in a test's seconds of waiting; ``holders`` names the processes it waits for."""
        due = sum(waited >= limit for limit in REPORTED_AT)
        if due <= self._lines.get(nodeid, 0) or hasattr(self._config, "workerinput"):
            return
        self._lines[nodeid] = due
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if reporter is not None:
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                reporter.ensure_newline()
                reporter.write_line(f"{nodeid} has waited {waited:.0f} s for {holders}")
                reporter.flush()


class WaitWatch(Waiting):
    """A thread of pytest-xdist's controller that watches the waits of its workers."""

    def __init__(self, config: pytest.Config, run: Callable[[], str]) -> None:
        super().__init__(config)
        self._run = run
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpumem-waiting", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        ledger: Ledger | None = None
        while not self._done.wait(LOOKED_EVERY):
            try:
                if ledger is None and (default_folder() / FILE_NAME).exists():
                    ledger = Ledger(default_folder())
                if ledger is not None:
                    self._report_all(ledger.state({}))
            except SharingError:
                break  # its workers report that
        if ledger is not None:
            ledger.close()

    def _report_all(self, state: State) -> None:
        holders = ", ".join(holding(state)) or "tests before it wait too"
        for lease in state.waiting:
            if lease.run == self._run():
                amount = format_size(sum(lease.request.needs.values()))
                waited = time.time() - lease.request.since
                self.report(lease.nodeid, waited, f"{amount}: {holders}")
