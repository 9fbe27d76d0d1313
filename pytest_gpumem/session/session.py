"""The state of the pytest process: settings, devices, and the choice of measured tests.

Every project with the plugin installed pays for this module: imports that only measured tests
need are local.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.device.computed import Computed
from pytest_gpumem.device.select import SELECTOR, DeviceSelector
from pytest_gpumem.options import settings_from
from pytest_gpumem.paths import relative
from pytest_gpumem.report import pytest_reports
from pytest_gpumem.report.pytest_reports import ATTRIBUTE, HARMLESS, SKIPPED_AT_IMPORT
from pytest_gpumem.session.early import AMBIENT, Ambient, begin
from pytest_gpumem.session.expected import MARKER_NAME
from pytest_gpumem.session.parts import Parts, runs_tests
from pytest_gpumem.session.used_fixtures import taken_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.session.faults import Faults
    from pytest_gpumem.session.fixture import Gpumem, IdleGpumem
    from pytest_gpumem.session.item import MeasuredItem
    from pytest_gpumem.session.ranks import WorstOfTest
    from pytest_gpumem.session.rerun import Again
    from pytest_gpumem.session.waiting import WaitWatch
    from pytest_gpumem.sharing.usage import Usage


ISOLATED = "gpumem-isolated-reports"
"""The name of the plugin that marks a process of a single test."""


class GpumemSession(Parts):
    """The plugin's state in one process, which may be a pytest-xdist worker or controller."""

    def __init__(self, config: pytest.Config) -> None:
        settings = settings_from(config)
        early = _early(config)
        super().__init__(
            config,
            settings,
            early.selector
            if early
            else config.stash.get(SELECTOR, None) or DeviceSelector(settings.device),
        )
        self.selector.stand_ins = settings.stand_ins
        self.selector.compile = settings.sim_compile
        self.current: MeasuredItem | None = None
        self._worst: WorstOfTest | None = None
        self.run_id = ""
        """The run's id in the workers of pytest-xdist; known when they start."""
        self._faults: Faults | None = None
        self._wait_watch: WaitWatch | None = None
        self._ambient: Device | None = None
        """The device of unmarked tests; ``None`` for the machine as it is."""

    def start(self) -> None:
        """Activate the simulated GPU, where the options require it."""
        if self.launched is not None:
            self.launched.be_quiet()
        if self.settings.share and not runs_tests(self._config):
            from pytest_gpumem.session.waiting import WaitWatch

            self._wait_watch = WaitWatch(self._config, lambda: self.run_id)
            self._wait_watch.start()
        if (
            self.settings.sim_scope == "session"
            and not self.selector.off
            and runs_tests(self._config)
        ):
            early = _early(self._config)
            if early is None:
                from pytest_gpumem.device.errors import DeviceError

                try:
                    early = begin(self._config, self.settings, self.selector)
                except DeviceError as error:
                    raise pytest.UsageError(str(error)) from None
            self.selector, self._ambient = early.selector, early.device

    def stop(self) -> None:
        """Restore the state of the process, also where a test was interrupted."""
        self.end()
        if self._wait_watch is not None:
            self._wait_watch.stop()
        if ambient := self._config.stash.get(AMBIENT, None):
            ambient.resources.close()
        if "sharing" in vars(self):
            self.sharing.close()
        if "watched" in vars(self):
            self.watched.close()
        if self.launched is not None:
            self.launched.end()

    def header(self) -> str:
        """Return the header line with the devices that tests are measured on."""
        from pytest_gpumem.report.header import header_line, torch_release

        root = self.settings.baselines
        folders: list[str] = []
        with suppress(OSError):  # an unreadable folder is reported where a baseline is needed
            folders += sorted(path.name for path in root.glob("[!.]*") if path.is_dir())
        shown = relative(root, self._config.rootpath)
        return header_line(
            self.selector.description, torch_release(), shown, folders, self.described
        )

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """Record the collected tests."""
        marked = any(item.get_closest_marker(MARKER_NAME) for item in items)
        self.results.collected([item.nodeid for item in items], marked=marked)

    def selected(self, items: Sequence[pytest.Item]) -> None:
        """Send the needs of this worker's tests, so that they are well ordered."""
        if self.settings.device.kind == "cuda":
            from pytest_gpumem.session.asked_device import check_device

            check_device(self._config, self.selector, items)
        self._prepare_isolation(items)
        if self.launched is not None:
            self.launched.meet(items, self._expectations)
        if self.settings.share and hasattr(self._config, "workerinput"):
            sharing = [(item, found) for item in items if (found := self._shares(item))]
            self.sharing.plan((item, *found) for item, found in sharing)

    def scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """Return the scheduler of tests to workers, ``None`` for pytest-xdist's own."""
        if not self.settings.share or config.getoption("dist", "no") != "load":
            return None
        from pytest_gpumem.sharing.order import MemoryScheduling

        return MemoryScheduling(config, log, self.hosts.place)

    def finish(self, session: pytest.Session) -> None:
        """Write baselines and reports, in the process that has all results."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput.update(self.results.output())
            return
        if self._config.getoption("collectonly", False):
            return
        if self.settings.all and not self.selector.off and not self._expectations.torch_is_there:
            self.results.note("--gpumem-all measured no test, because torch is not installed")
        if self.settings.share:
            self.results.usages = self._usages()
            self.results.foreseen = self.hosts.learned
        speaks = self.launched is None or self.launched.speaks
        fails = speaks and not self.results.finish(session.exitstatus)
        if fails and session.exitstatus in HARMLESS:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.launched is not None:
            self.launched.finish(session, self.results)

    def _usages(self) -> list[Usage]:
        return self.hosts.usages(self.run_id) if self.run_id else self.sharing.usages()

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Make one test id of each GPU model that a test names."""
        self._expectations.parametrize(metafunc)

    def check(self, report: pytest.CollectReport) -> None:
        """Turn an error in a test's marker into an error of its collection."""
        items = [node for node in report.result or () if isinstance(node, pytest.Item)]
        problems = ((item.nodeid, self._expectations.problem(item)) for item in items)
        errors = [f"{nodeid}: {problem}" for nodeid, problem in problems if problem]
        if errors:
            report.outcome = "failed"
            report.longrepr = "\n".join(errors)
            report.result = []
        elif any(self._runs_on_gpu(item) for item in items) and (why := self.host.refusal):
            self.host.refuse(report, why)

    def _runs_on_gpu(self, item: pytest.Item) -> bool:
        # A question that imports torch is asked only where its answer matters.
        if not self.host.refusal or (shares := self._shares(item)) is None:
            return False
        return shares[1] is self.selector.real()

    def admitted(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Return the context in which ``item`` may run beside the tests of other processes."""
        if self._faults is not None:
            self._faults.leave_if_lost(item)
        found = self._shares(item) if self.settings.share else None
        return nullcontext() if found is None else self.sharing.admitted(item, *found)

    def _shares(self, item: pytest.Item) -> tuple[Expectation | None, Device] | None:
        """Return the expectation and device of ``item``, ``None`` if it is not measured."""
        if not self._expectations.is_measured(item):
            return None
        from pytest_gpumem.device.errors import DeviceError

        try:
            model = self._expectations.models(item)[0]
            device = self.selector.select(model, seat=self._expectations.seat(item))
        except DeviceError:
            return None  # reported where the test begins
        return self._expectations.of(item), device

    def begin(
        self, item: pytest.Item, *, computed: Computed = Computed.AT_FIRST, first: bool = False
    ) -> None:
        """Start measuring ``item`` if it is to be measured; may skip or fail it with a sentence.

        The device computes the values that this or the options request. The ``first`` run may
        request others.
        """
        self.current = None
        self._worst = self._expectations.worst(item) if first else self._worst
        if self.selector.off or item.get_closest_marker("skip"):
            return
        if refusal := self.settings.share and self.sharing.refusal:
            pytest.fail(refusal, pytrace=False)
        if problem := self._expectations.problem(
            item
        ):  # of a marker that was added after collection
            pytest.fail(problem, pytrace=False)
        if self._expectations.is_measured(item):
            device = self.measuring.device_of(item, self._worst, computed=computed)
            self._renew(item, device)
            self.current = self.measuring.begin(item, device)
            self.watched.begins(self.current)
        else:
            self._renew(item, self._ambient)
            if self._ambient is not None:
                self._ambient.begin_unmeasured()

    def end(self) -> None:
        """Stop measuring the current test."""
        measured, self.current = self.current, None
        if measured is not None:
            self.watched.ended(measured)
            measured.close()

    def fixture(self) -> Gpumem | IdleGpumem:
        """Return the value of the ``gpumem`` fixture for the current test."""
        from pytest_gpumem.session.fixture import Gpumem, IdleGpumem

        if self.current is not None:
            return Gpumem(self.current)
        return IdleGpumem(
            "--gpumem-device=off measures nothing"
            if self.selector.off
            else "a test that asks for gpumem by getfixturevalue() is not measured: name it among "
            "the test's arguments"
        )

    def again(self, item: pytest.Item, error: BaseException | None = None) -> Again | None:
        """Return the run that ``item`` needs after ``error``, ``None`` where it needs no other."""
        if self.current is None:
            return None
        if self.settings.share and (shared := self.sharing.again(self, item, error)):
            return shared
        from pytest_gpumem.session.second_run import second_run

        again = second_run(self, item, error)
        return self._worst.next_run(self, item, error) if self._worst and not again else again

    def isolated(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run ``item`` in a process of its own if it requests that; return whether it did."""
        if self._is_one_of_several or (self.settings.share and self.sharing.refusal):
            return False
        if (processes := self._expectations.processes(item)) is None:
            return False
        self._isolation.run(item, nextitem, processes)
        return True

    @property
    def _is_one_of_several(self) -> bool:
        """Whether this process has been started for a single test, or for a single rank."""
        return self.launched is not None or self._config.pluginmanager.hasplugin(ISOLATED)

    def _prepare_isolation(self, items: Sequence[pytest.Item]) -> None:
        """Prepare a standby process if some test requests one and this process runs tests."""
        if self.selector.off or self._is_one_of_several:
            return
        asks = (expectation for item in items if (expectation := self._expectations.of(item)))
        if any(expectation.isolate for expectation in asks):
            self._isolation.prepare()

    def look_for_fault(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Check after a failed test whether its device still works."""
        if self.current is None or not report.failed:
            return
        from pytest_gpumem.session.faults import Faults

        self._faults = self._faults or Faults(self._config)
        sharing = self.sharing if self.settings.share else None
        self._faults.look(item, report, self.current.device, sharing)

    def reschedule(self, nodeid: str, report: Any, scheduler: Any) -> None:
        """Reschedule the next test of a worker that left on purpose."""
        is_suspect = self.settings.share and nodeid in self.hosts.suspects
        self.results.crashes.reschedule(nodeid, report, scheduler, is_suspect=is_suspect)

    def repeat(self, item: pytest.Item, again: Again, run: Callable[[Again], None]) -> None:
        """Call ``run`` with ``again`` and with further runs that are needed after it."""
        following: Again | None = again
        while following is not None:
            try:
                run(following)
                following = self.again(item)
            except BaseException as error:
                following = self.again(item, error)
                if following is None:
                    raise

    @contextmanager
    def settling(self, item: pytest.Item, *, called: bool) -> Iterator[None]:
        """Set up ``item`` inside, or call it if ``called``, with one outcome on all ranks."""
        if self.launched is None or not self._expectations.is_measured(item):
            yield
            return
        with self.launched.settling(item, self, self._expectations.of(item), called=called):
            yield

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Measure the current test's call inside."""
        measured = self.current
        if measured is None and not self.results.any_marked:
            yield
            return
        from pytest_gpumem.session.kept import process_kept

        with ExitStack() as inside:
            inside.enter_context(measured.calling() if measured else process_kept())
            if self.settings.share and measured:
                inside.enter_context(self.sharing.interruptible())
            yield

    def note_skip(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Record a marked test that a condition skipped when its module was imported."""
        if (
            report.skipped
            and report.when != "teardown"
            and self._imports_without_gpu
            and (self.settings.all or item.get_closest_marker(MARKER_NAME))
        ):
            from pytest_gpumem.session.skipped import is_skipped_at_import

            if is_skipped_at_import(item):
                setattr(report, SKIPPED_AT_IMPORT, True)

    @property
    def _imports_without_gpu(self) -> bool:
        """Whether modules are imported before the GPU of their tests is simulated."""
        return (
            self.settings.sim_scope == "test"
            and not self.selector.off
            and self.settings.device.kind != "cuda"
        )

    def note_company(self, report: pytest.TestReport) -> None:
        """Record at a test's end how many others it has shared its devices with."""
        if report.when == "teardown" and "sharing" in vars(self):
            beside = self.sharing.beside()
            if beside is not None:
                from pytest_gpumem.session.stopwatch import BESIDE

                setattr(report, BESIDE, beside)

    def tell(self, node: Any) -> None:
        """Send this process's data to a worker of pytest-xdist, which may be on another host."""
        workerinput = node.workerinput
        self.run_id = workerinput["testrunuid"]
        if self.sharding is not None:
            from pytest_gpumem.session.learning import WEIGHTS

            workerinput[WEIGHTS] = self.sharding.weights.to_dict()
        if self.settings.share:
            self.hosts.connect(node)
            from pytest_gpumem.session.learning import INPUT, learned_before

            workerinput[INPUT] = learned_before(self._config).to_dict()

    def note_module(self, collector: pytest.Collector, report: pytest.CollectReport) -> None:
        """Record a module that skipped itself by a condition on the device."""
        if report.skipped and self._imports_without_gpu and isinstance(collector, pytest.Module):
            from pytest_gpumem.session.skipped import skipped_for_its_device

            if skipped_for_its_device(
                collector.path, report.longrepr, everything=self.settings.all
            ):
                self.results.module_skipped(report.nodeid)

    def complete(self, report: pytest.TestReport, *, raised: bool) -> None:
        """Put the current test's record on its final call report."""
        if self.current is not None:
            report.user_properties = pytest_reports.of_builtin_types(report.user_properties)
            self.current.complete(report, raised=raised)
            record = getattr(report, ATTRIBUTE, None)
            if record is not None and self.settings.share and self.sharing.passage:
                record["sharing"] = self.sharing.passage.to_dict()
                self.sharing.learn(record)

    @contextmanager
    def setting_up(
        self, fixture: FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Set ``fixture`` up inside, metered."""
        with ExitStack() as contexts:
            if self.results.any_marked:
                device = self.current.device if self.current else self._ambient
                machine = self._machine(device)
                contexts.enter_context(self.fixture_devices.setting_up(fixture, machine))
                if device is not None:
                    contexts.enter_context(device.setting_up(fixture))
            if self.current:
                contexts.enter_context(self.current.setting_up(fixture, request))
            contexts.enter_context(taken_back(fixture, request))
            yield

    def forget(self, fixture: FixtureDef[Any]) -> None:
        """Drop the records of a fixture that has been torn down."""
        if "fixture_devices" in vars(self):
            self.fixture_devices.forget(fixture)
        self.selector.forget(fixture)
        if "measuring" in vars(self):
            self.measuring.ledger.forget(fixture)

    def _renew(self, item: pytest.Item, device: Device | None) -> None:
        """Tear down fixtures that ``item`` shares with earlier tests of another device."""
        if "fixture_devices" in vars(self):
            self.fixture_devices.renew(item, self._machine(device))

    def _machine(self, device: Device | None) -> Device | None:
        """Return the simulated device that stands for a machine, ``None`` for the real one."""
        return None if device is None or device is self.selector.real() else device


def _early(config: pytest.Config) -> Ambient | None:
    """Return the device that exists already, ``None`` where it would not be the same now."""
    ambient = config.stash.get(AMBIENT, None)
    if ambient is None or ambient.is_current:
        return ambient
    ambient.resources.close()
    del config.stash[AMBIENT]
    return None
