"""The pytest hooks, a few lines each, which call the parts of the session.

The imports of this module, direct or not, take time in every project with the plugin installed, so
imports for measured tests only, or for rare cases, are local.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.options import MARKER, add_options, settings_from
from pytest_gpumem.report.pytest_reports import (
    ARGUMENTS,
    LOST,
    RESCHEDULED,
    hide_own_frames,
    leave_the_sentence,
    skip_unsimulated,
)
from pytest_gpumem.session import collection
from pytest_gpumem.session.context import REFUSAL, SIZED, begin_early
from pytest_gpumem.session.session import GpumemSession

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.session.fixture import Gpumem

SESSION = pytest.StashKey[GpumemSession]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options and their ini twins."""
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    args = config.invocation_params.args if config else ()
    variable: list[str] = []
    with suppress(ValueError):  # pytest reports an error in its variable
        variable = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    add_options(parser, [*map(str, args), *variable])


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks that other plugins can implement."""
    from pytest_gpumem import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Activate the simulated GPU before the first conftest is imported, if requested."""
    begin_early(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Read the settings, and register the session and the hooks that depend on it."""
    config.addinivalue_line("markers", MARKER)
    session = config.stash[SESSION] = GpumemSession(config)
    if session.launched is not None:
        config.pluginmanager.register(session.launched, "gpumem-ranks")
    if session.sharding is not None:
        config.pluginmanager.register(session.sharding, "gpumem-shard")
    config.pluginmanager.register(MoreHooks(session), "gpumem-more-hooks")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the header line with the devices that tests are measured on."""
    return config.stash[SESSION].header()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Activate the simulated GPU before anything is collected, if requested."""
    session.config.stash[SESSION].start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Deactivate the simulated GPU."""
    if SESSION in config.stash:
        config.stash[SESSION].stop()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each GPU model and number of ranks, which come last in the id."""
    metafunc.config.stash[SESSION].expectations.parametrize(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report wrong markers as errors of collection."""
    report = yield
    session = collector.config.stash[SESSION]
    collection.check(session, report)
    collection.note_module(session, collector, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record all tests before others are deselected."""
    config.stash[SESSION].collected(items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the tests that are left after deselection.

    This runs before pytest-xdist informs the controller, which then sends the first tests.
    """
    collection.selected(session.config.stash[SESSION], session.items)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto`` that fit the shared memory."""
    settings = settings_from(config)
    if not settings.share or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    from pytest_gpumem.session.placement import workers_by_memory

    if (found := workers_by_memory(config, settings)) is None:
        return None
    workers, config.stash[SIZED] = found
    return workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Return the scheduler that starts tests together if they fit beside each other."""
    return config.stash[SESSION].controller.scheduler(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for memory on a shared device."""
    lifecycle = item.config.stash[SESSION].lifecycle_of(item)
    with nullcontext() if lifecycle is None else lifecycle.admitted(item):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Begin to measure before any fixture is set up.

    This is the innermost wrapper, because it may skip: then the outer wrappers have begun.
    """
    lifecycle = item.config.stash[SESSION].lifecycle_of(item)
    if lifecycle is None:
        return (yield)
    with lifecycle.one_outcome(item, called=False):
        lifecycle.begin(item, first=True)
        try:
            return (yield)
        except BaseException as error:
            rerun = lifecycle.next_run(item, error)
            if rerun is None:
                raise
        return lifecycle.repeat(item, rerun, called=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Meter the memory of the fixture."""
    lifecycle = request.config.stash[SESSION].lifecycle
    with nullcontext() if lifecycle is None else lifecycle.setting_up(fixturedef, request):
        return (yield)


def pytest_fixture_post_finalizer(
    fixturedef: FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """Drop the records of the fixture."""
    if (lifecycle := request.config.stash[SESSION].lifecycle) is not None:
        lifecycle.forget(fixturedef)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Measure and judge the body."""
    session = item.config.stash[SESSION]
    lifecycle = session.lifecycle
    if lifecycle is None:
        with session.selector.left_alone():
            return (yield)
    with lifecycle.one_outcome(item, called=True):
        try:  # not a context manager: an error of a further run would have the first one's context
            with lifecycle.calling():
                yield
            rerun = lifecycle.next_run(item)
        except BaseException as error:
            rerun = lifecycle.next_run(item, error)
            if rerun is None:
                raise
        lifecycle.repeat(item, rerun, called=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Stop measuring when everything has been torn down."""
    try:
        return (yield)
    finally:
        if (lifecycle := item.config.stash[SESSION].lifecycle) is not None:
            lifecycle.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record to the final report of the call."""
    if call.excinfo is not None:
        hide_own_frames()
    report = yield
    session = item.config.stash[SESSION]
    lifecycle = session.lifecycle
    if call.excinfo is not None:
        unmeasured = lifecycle is None or lifecycle.current is None
        skip_unsimulated(item, report, call.excinfo.value, unmeasured=unmeasured)
        leave_the_sentence(item, report, call.excinfo.value)
    collection.note_test(session, item, report)
    if lifecycle is not None:
        lifecycle.complete(item, report, raised=call.excinfo is not None)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write baselines and reports; a write error fails the run."""
    session.config.stash[SESSION].finish(session)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send a worker of pytest-xdist the arguments that pytest was started with."""
    from pytest_gpumem.report.commands import COMMAND, Command

    session = node.config.stash[SESSION]
    session.controller.send_input(node, session.sharding and session.sharding.weights)
    node.workerinput[COMMAND] = Command.of(node.config).to_dict()
    node.workerinput[ARGUMENTS] = list(map(os.fspath, node.config.invocation_params.args))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the output of a worker of pytest-xdist."""
    node.config.stash[SESSION].results.take_output(getattr(node, "workeroutput", None) or {})


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """Reschedule the next test of a worker that exited because it lost the CUDA context."""
    report.node.config.stash[SESSION].controller.reschedule(crashitem, report, sched)


def pytest_report_teststatus(report: Any) -> object | None:
    """Return the status of a test that is rescheduled."""
    is_again = hasattr(report, RESCHEDULED)
    return ("rescheduled", "", ("RESCHEDULED", {"yellow": True})) if is_again else None


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Write the section "gpumem"."""
    config.stash[SESSION].summarize()


class MoreHooks:
    """Hooks without a config argument, and second implementations of hooks of this module."""

    def __init__(self, session: GpumemSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the record that a report carries."""
        if hasattr(report, LOST):
            self._session.controller.take(report)
        self._session.results.take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that could not be collected; end the run if a worker refuses it."""
        if hasattr(report, REFUSAL) and "PYTEST_XDIST_WORKER" not in os.environ:
            raise pytest.UsageError(str(report.longrepr))
        if report.failed:
            self._session.results.not_collected(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Report failures of one cause once."""
        with self._session.results.failures_shown_once(terminalreporter):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Run the test in its own process."""
        lifecycle = self._session.lifecycle
        return (lifecycle is not None and lifecycle.isolated(item, nextitem)) or None


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> Gpumem:
    """The phases, device and numbers of the test's GPU memory."""
    return request.config.stash[SESSION].fixture()
