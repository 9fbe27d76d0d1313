"""The pytest hooks; what they do stands in the rooms that they call."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.options import MARKER, add_options
from pytest_gpumem.session.early import begin_early
from pytest_gpumem.session.results import (
    ARGUMENTS,
    Results,
    hide_own_frames,
    leave_the_sentence,
    skip_unsimulated,
)
from pytest_gpumem.session.session import MODEL_PARAMETER, GpumemSession

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.session.fixture import Gpumem, IdleGpumem

SESSION = pytest.StashKey[GpumemSession]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and their ini twins."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Let the simulated GPU exist before the first conftest is imported, if asked for."""
    begin_early(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Read the settings."""
    config.addinivalue_line("markers", MARKER)
    session = config.stash[SESSION] = GpumemSession(config)
    config.pluginmanager.register(ReportHooks(session.results), "gpumem-reports")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is real."""
    return config.stash[SESSION].header()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the simulated GPU exist before anything is collected, if asked for."""
    session.config.stash[SESSION].start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the simulated GPU away."""
    if SESSION in config.stash:
        config.stash[SESSION].stop()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each GPU model, which stands last in the id."""
    metafunc.config.stash[SESSION].parametrize(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report wrong markers as errors of collection."""
    report = yield
    collector.config.stash[SESSION].check(report)
    collector.config.stash[SESSION].note_module(collector, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See all tests before others are deselected."""
    config.stash[SESSION].collected(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """See the tests that are left when others have been deselected."""
    session.config.stash[SESSION].selected(session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Hand tests out so that those which fit beside each other come together."""
    return config.stash[SESSION].scheduler(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for memory on a shared device."""
    with item.config.stash[SESSION].admitted(item):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Begin to measure before any fixture is set up.

    Innermost, because it may skip: an outer wrapper's set-up has to have happened by then.
    """
    session = item.config.stash[SESSION]
    session.begin(item)
    try:
        return (yield)
    except BaseException as error:
        again = session.second_run(item, error)
        if again is None:
            raise
    again.set_up()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Meter what the fixture takes."""
    with request.config.stash[SESSION].setting_up(fixturedef, request):
        return (yield)


def pytest_fixture_post_finalizer(
    fixturedef: FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """Forget what the fixture took."""
    request.config.stash[SESSION].forget(fixturedef)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Measure and judge the body."""
    session = item.config.stash[SESSION]
    try:
        with session.calling():
            yield
        again = session.second_run(item)
    except BaseException as error:
        again = session.second_run(item, error)
        if again is None:
            raise
    if again is not None:
        again.call()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Stop measuring when everything has been torn down."""
    try:
        return (yield)
    finally:
        item.config.stash[SESSION].end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the record on the final report of the call."""
    if call.excinfo is not None:
        hide_own_frames()
    report = yield
    if call.excinfo is not None:
        skip_unsimulated(item, report, call.excinfo.value)
        leave_the_sentence(report, call.excinfo.value)
    item.config.stash[SESSION].note_skip(item, report)
    item.config.stash[SESSION].complete(report, raised=call.excinfo is not None)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what there is to write; what cannot be written fails the run."""
    session.config.stash[SESSION].finish(session)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist what pytest was started with."""
    node.config.stash[SESSION].run_id = node.workerinput["testrunuid"]
    node.workerinput[ARGUMENTS] = list(map(os.fspath, node.config.invocation_params.args))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a worker of pytest-xdist collected."""
    node.config.stash[SESSION].results.take_output(getattr(node, "workeroutput", None) or {})


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Write the section "gpumem"."""
    config.stash[SESSION].results.summarize()


class ReportHooks:
    """The hooks that are told neither session nor config."""

    def __init__(self, results: Results) -> None:
        self._results = results

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the record that a report carries."""
        self._results.take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self._results.not_collected(report.nodeid)


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> Gpumem | IdleGpumem:
    """Phases, device and numbers of the test's GPU memory."""
    return request.config.stash[SESSION].fixture()


@pytest.fixture(name=MODEL_PARAMETER)
def gpu_model(request: pytest.FixtureRequest) -> str:
    """Return the GPU model of the test's id."""
    model: str = request.param
    return model
