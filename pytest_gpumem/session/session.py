"""The session of one pytest process: what it starts, hands to its tests, and writes at its end.

Every project with the plugin installed pays for this module: imports that only measured tests
need are local.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.device import DeviceError
from pytest_gpumem.paths import relative
from pytest_gpumem.report.pytest_reports import HARMLESS
from pytest_gpumem.session.early import begin, current_ambient
from pytest_gpumem.session.expected import MARKER_NAME
from pytest_gpumem.session.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.session.collection import Collection
    from pytest_gpumem.session.conclusion import Conclusion
    from pytest_gpumem.session.controller import Controller
    from pytest_gpumem.session.fixture import Gpumem, IdleGpumem
    from pytest_gpumem.session.lifecycle import TestLifecycle
    from pytest_gpumem.session.shard import Sharding


class GpumemSession(Parts):
    """The plugin's state in one process, which may be a pytest-xdist worker or controller."""

    lifecycle: TestLifecycle | None = None
    """The lifecycle of this process's tests; ``None`` while none of them is measured."""

    def start(self) -> None:
        """Activate the simulated GPU, where the options require it."""
        if self.launched is not None:
            self.launched.keep_output()
            self.closing.callback(self.launched.end)
        if self.settings.share and not self.runs_tests:
            self.controller.watch_waits()
        if self.settings.sim_scope != "session" or self.selector.off or not self.runs_tests:
            return
        early = current_ambient(self.config)
        if early is None:
            try:
                early = begin(self.config, self.settings, self.selector)
            except DeviceError as error:
                raise pytest.UsageError(str(error)) from None
        self.ambient = early.device

    def stop(self) -> None:
        """Restore the state of the process, also where a test was interrupted."""
        if self.lifecycle is not None:
            self.lifecycle.end()
        if ambient := current_ambient(self.config):
            ambient.resources.close()
        self.closing.close()

    def header(self) -> str:
        """Return the header line with the devices that tests are measured on."""
        from pytest_gpumem.report.header import header_line, installed_release

        root = self.settings.baselines
        folders: list[str] = []
        with suppress(OSError):  # an unreadable folder is reported where a baseline is needed
            folders += sorted(path.name for path in root.glob("[!.]*") if path.is_dir())
        shown = relative(root, self.config.rootpath)
        launched = self.launched
        ranks = [] if launched is None else [f"{launched.world.size} ranks, a process each"]
        clauses = [*ranks, *self.host.described]
        return header_line(
            self.selector.description, installed_release("torch"), shown, folders, clauses
        )

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """Record the collected tests."""
        marked = any(item.get_closest_marker(MARKER_NAME) for item in items)
        self.results.collected([item.nodeid for item in items], marked=marked)

    def finish(self, session: pytest.Session) -> None:
        """Write baselines and reports, in the process that has all results."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update(self.results.output())
            return
        if self.config.getoption("collectonly", False):
            return
        if self.settings.all and not self.selector.off and not self.expectations.torch_is_there:
            self.results.notes.append(
                "--gpumem-all measured no test, because torch is not installed"
            )
        if self.sharing is not None:
            self.results.usages = self.controller.usages() or self.sharing.usages()
            self.results.foreseen = self.controller.hosts.learned
        writes = self._writes and (self.launched is None or self.launched.writes_output)
        fails = writes and not self.conclusion.finish(session.exitstatus)
        if fails and session.exitstatus in HARMLESS:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.launched is not None:
            self.launched.finish(session, self.results)

    def summarize(self) -> None:
        """Write the terminal's section, where there is something to say."""
        if self._writes or self.results.has_notes:
            self.conclusion.summarize()

    @property
    def _writes(self) -> bool:
        """Whether files are written at the end, or may have to be."""
        settings = self.settings
        asked = any(not target.unasked for target in settings.reports)
        changes = settings.update or settings.prune
        return bool(self.results.by_run or asked or changes or settings.share or settings.shard)

    def fixture(self) -> Gpumem | IdleGpumem:
        """Return the value of the ``gpumem`` fixture for the current test."""
        from pytest_gpumem.session.fixture import Gpumem, IdleGpumem

        if self.lifecycle is not None and self.lifecycle.current is not None:
            return Gpumem(self.lifecycle.current.run)
        return IdleGpumem(off=self.selector.off)

    def lifecycle_of(self, item: pytest.Item) -> TestLifecycle | None:
        """Return the lifecycle of tests, ``None`` where no test is measured so far nor ``item``."""
        if self.lifecycle is None and (
            self.results.any_marked
            or self.ambient is not None
            or item.get_closest_marker(MARKER_NAME)
            or self.expectations.is_measured(item)
        ):
            from pytest_gpumem.session.lifecycle import TestLifecycle

            self.lifecycle = TestLifecycle(self)
        return self.lifecycle

    @cached_property
    def collection(self) -> Collection:
        """The checks of what is collected."""
        from pytest_gpumem.session.collection import Collection

        return Collection(self)

    @cached_property
    def conclusion(self) -> Conclusion:
        """The reports and baselines that are written at the end."""
        from pytest_gpumem.session.conclusion import Conclusion

        return Conclusion(self.results)

    @cached_property
    def controller(self) -> Controller:
        """The service to workers of pytest-xdist that this process has started."""
        from pytest_gpumem.session.controller import Controller

        return Controller(self)

    @cached_property
    def sharding(self) -> Sharding | None:
        """The deselection of other machines' tests, ``None`` without ``--gpumem-shard``."""
        if self.settings.shard is None:
            return None
        from pytest_gpumem.session.shard import Sharding

        return Sharding(self.config, self.settings, self.results, self.expectations.of)
