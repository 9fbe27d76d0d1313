"""Runs of tests on simulated GPUs, in a separate process.

The process is pytest with the arguments of the calling one, so that the same conftest files, ini
file, options and plugins apply, and with this module as a plugin. Options whose effects must not
happen twice are switched off: reports, caches, baselines, workers, debuggers.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.select import SELECTOR, DeviceSelector
from pytest_gpumem.option_values import DeviceChoice
from pytest_gpumem.report.pytest_reports import ATTRIBUTE
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.simulated.gpu.catalogue import Machine, find_machine
from pytest_gpumem.values.prediction import Prediction
from pytest_gpumem.values.serialization import Plain

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Device
    from pytest_gpumem.values.world import RequestedRank

REQUEST = "PYTEST_GPUMEM_REQUEST"
"""The environment variable with the path of a :class:`Request`; the results are written beside it.
"""
ANSWER = "answer.json"

UNBOUNDED = 1 << 50
"""Bytes of a device on which any program fits, to measure how much it needs."""

RAN_OUT = "it runs out of memory"
"""The problem of a test that ran out of memory."""

_OPTIONS: dict[str, Any] = {
    "gpumem_all": True,
    "gpumem_sim_scope": "session",  # a real GPU exists while modules are imported, too
    "gpumem_report": ["off"],
    "dist": "no",
    "maxfail": 0,
    "log_file": os.devnull,
    **dict.fromkeys(("gpumem_update_baselines", "gpumem_prune_baselines", "gpumem_artifacts")),
    **dict.fromkeys(("gpumem_share", "gpumem_shard", "numprocesses")),
    **dict.fromkeys(("xmlpath", "report_log", "htmlpath")),
    **dict.fromkeys(("usepdb", "trace", "lf", "failedfirst", "newfirst", "stepwise"), False),
}
"""Options of pytest and well-known plugins, by their names in ``config.option``."""

INI = (
    *("gpumem_prune_baselines=false", "gpumem_share=false", "gpumem_update_baselines="),
    *("gpumem_report=", "gpumem_shard=", "gpumem_artifacts="),
)
"""Settings of the ini file that are overridden, as values of ``-o``."""


EAGER, COMPILED = "eager", "compiled"


@dataclass(frozen=True)
class Mode(Plain):
    """A way to run a program."""

    code: str = ""
    """:data:`EAGER` or :data:`COMPILED`."""
    modules: bool = False
    """Whether its modules are compiled although the program itself compiles nothing."""

    @property
    def compile(self) -> str:
        """The argument ``compile`` of ``simulate``, for its calls of ``torch.compile``."""
        return "eager" if self.code == EAGER else "auto"


AS_IT_IS = Mode()


@dataclass(frozen=True)
class Request(Plain):
    """Tests, and the machines; each test runs on each machine."""

    tests: tuple[str, ...]
    """Node ids, which may begin with an absolute path."""
    machines: tuple[Machine, ...]
    unbounded: bool = False
    """Whether a test that runs out of memory runs again with unlimited memory."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further values of ``config.option``, by name; none for a dry device."""
    seconds: float | None = None
    """Seconds after which no further test begins; a running one may take as long again."""
    mode: Mode = AS_IT_IS
    dry: bool = False
    """Whether each machine is a dry device, in a separate process."""


@dataclass(frozen=True)
class MachineResult(Plain):
    """The result of one test on one simulated machine."""

    nodeid: str
    gpu: str
    record: TestRecord | None
    """The test's record; ``None`` where it was not measured."""
    fits: bool
    """Whether memory sufficed; if not, it ran again with unlimited memory, if requested."""
    problem: str
    """The reason of a skip or failure; if only a verdict failed, the numbers are valid."""

    @property
    def measured(self) -> bool:
        """Whether the body ran to its end on the device."""
        record = self.record
        return record is not None and (record.judged or record.outcome == "passed")


def run_tests(
    request: Request, arguments: Sequence[str] = (), folder: Path | None = None
) -> list[MachineResult]:
    """Run the tests on each of the machines; the caller's process is not changed.

    ``arguments`` are those of the calling pytest in ``folder``. Raises ``ValueError`` if
    pytest ends before it runs tests.
    """
    if not request.dry:
        return _results(request, arguments, folder, {})
    from pytest_gpumem.dry.load import environment_of_option

    found = []
    for machine in request.machines:
        gpu = machine.name
        one = replace(request, machines=(machine,), unbounded=False)
        for answer in _results(one, arguments, folder, environment_of_option(gpu)):
            if request.unbounded and answer.problem == RAN_OUT:
                again = replace(one, tests=(answer.nodeid,))
                larger = environment_of_option(gpu, UNBOUNDED)
                (large,) = _results(again, arguments, folder, larger)
                answer = replace(large, fits=False)
            found.append(answer)
    return found


def _results(
    request: Request, arguments: Sequence[str], folder: Path | None, variables: Mapping[str, str]
) -> list[MachineResult]:
    """Return the results of ``request`` from a process with these environment ``variables``."""
    seconds = request.seconds
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        request.to_file(own / "request.json")
        # After ``--`` there are only tests.
        given = list(arguments)
        end = given.index("--") if "--" in given else len(given)
        options = ["-p", __name__]
        if request.mode.code:
            options.append(f"--gpumem-sim-compile={request.mode.compile}")
        for setting in (f"cache_dir={own / 'cache'}", *INI):
            options += ["-o", setting]
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", *given[:end], *options, *given[end:]],
                cwd=folder,
                env={**os.environ, **variables, REQUEST: str(own / "request.json")},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=None if seconds is None else 2 * seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"it takes longer than {2 * (seconds or 0):.0f} s") from error
        answer = own / ANSWER
        found = json.loads(answer.read_bytes()) if answer.is_file() else []
    if not found:
        raise ValueError(last_words(ran))
    return [MachineResult.from_dict(answer) for answer in found]


def last_words(ran: subprocess.CompletedProcess[str]) -> str:
    """Return pytest's first error, else its last line."""
    lines = [line.strip() for line in (*ran.stderr.splitlines(), *ran.stdout.splitlines())]
    written = [line for line in lines if line.strip("= ")]
    # Headings, such as "==== ERRORS ====", still have their signs and do not match.
    errors = [line for line in written if line.startswith(("ERROR", "E  ", "FAILED"))]
    if errors and errors[0].startswith("ERROR: usage:"):  # of argparse, before its error
        errors = [line for line in lines if ": error: " in line] or errors
    last = errors or written[-1:] or [f"pytest ended with code {ran.returncode}"]
    return last[0].strip("= ")


def predict_test(
    nodeid: str, gpus: Sequence[str], *, mode: Mode = AS_IT_IS, dry: bool = False
) -> list[Prediction]:
    """Run a test on simulated or ``dry`` GPUs, in a separate process; return the result for each.

    A ``mode`` is added to the result, with the live blocks at the peaks. Limits, baselines and the
    model in the test's marker are ignored. Raises ``ValueError`` for a model that is not in the
    catalogue, ``ValueError`` if ``nodeid`` is not one test, or does not run there.
    """
    machines = {machine.name: machine for machine in map(find_machine, gpus)}
    request = Request((nodeid,), tuple(machines.values()), unbounded=True, mode=mode, dry=dry)
    try:
        answers = run_tests(request)
    except ValueError as error:
        raise ValueError(f"{nodeid} was not run: {error}") from error
    tests = {answer.nodeid for answer in answers}
    if len(tests) > 1:
        raise ValueError(f"{nodeid} names {len(tests)} tests; give one of them, like {min(tests)}")
    predictions = []
    for answer in answers:
        gpu, total = answer.gpu, machines[answer.gpu].model.total_memory
        measured = answer.record.measurements if answer.measured and answer.record else ()
        if not measured:
            why = answer.problem or "it allocates nothing on the device"
            raise ValueError(f"{answer.nodeid} cannot be predicted for {gpu}: {why}")
        fits, code = answer.fits, mode.code
        predictions.append(Prediction.of(measured, gpu, total, fits=fits, code=code))
    return predictions


# The plugin of that process.


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Choose the machine before the plugin needs one."""
    path = Path(os.environ[REQUEST])
    selector = early_config.stash[SELECTOR] = Simulations(Request.from_file(path))
    early_config.pluginmanager.register(_Runs(selector, path.parent), "gpumem-prediction")
    return (yield)


class Simulations(DeviceSelector):
    """A device selector that always chooses the machine of the current run."""

    def __init__(self, request: Request) -> None:
        self.request, self.machine = request, request.machines[0]
        super().__init__(DeviceChoice("auto", models=(self.machine.model.name,)))

    def measured_device(
        self, computed: ValueLevel = ValueLevel.AT_FIRST, requested: RequestedRank | None = None
    ) -> None:
        """Return ``None``: no test is measured."""

    def select(
        self,
        model: str | None,
        *,
        computed: ValueLevel = ValueLevel.AT_FIRST,
        requested: RequestedRank | None = None,
    ) -> Device:
        """Return the device of the current machine."""
        if self.request.dry:
            return self._dry(computed, requested)
        self.check_torch()
        return self._simulate(self.machine, computed, requested)


class _Runs:
    """A plugin that runs all tests on each machine."""

    def __init__(self, selector: Simulations, folder: Path) -> None:
        self._request = request = selector.request
        self._selector = selector
        self._folder = folder
        self._results: list[dict[str, Any]] = []
        self._present: dict[str, dict[str, Any]] = {}
        self._short: set[str] = set()
        """Tests that ran out of memory."""
        self._end = math.inf if request.seconds is None else time.monotonic() + request.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Replace the command line's options on tests, workers and reports."""
        options = {**_OPTIONS, "basetemp": str(self._folder / "tmp"), **self._request.options}
        for name, value in options.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.args = list(self._request.tests)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests in place of other plugins' loops, which run them only once."""
        if session.testsfailed:
            return None
        with modules_compiled() if self._request.mode.modules else nullcontext():
            for machine in self._request.machines:
                found = self._run(session.items, machine)
                short = [item for item in session.items if item.nodeid in self._short]
                if short and self._request.unbounded:
                    large = replace(machine.model, total_memory=UNBOUNDED)
                    again = self._run(short, Machine(large, machine.count))
                    found.update((name, {**one, "fits": False}) for name, one in again.items())
                self._results += found.values()
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record tests that ran out of memory; unittest's failures are known here, too."""
        import torch

        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(torch.OutOfMemoryError):
            self._short.add(item.nodeid)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        empty = {"nodeid": report.nodeid, "record": None, "fits": True, "problem": ""}
        answer = self._present.setdefault(report.nodeid, empty)
        if record := getattr(report, ATTRIBUTE, None):
            answer["record"] = record
        if not report.passed and not answer["problem"]:
            answer["problem"] = RAN_OUT if report.nodeid in self._short else _problem(report)

    def pytest_sessionfinish(self) -> None:
        (self._folder / ANSWER).write_text(json.dumps(self._results), encoding="utf-8")

    def _run(self, items: list[pytest.Item], machine: Machine) -> dict[str, dict[str, Any]]:
        self._selector.machine = machine
        self._present, self._short = {}, set()
        # After the last test everything is torn down, so that the next machine has new fixtures.
        for item, following in zip(items, [*items[1:], None], strict=True):
            if time.monotonic() > self._end:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return {nodeid: {**answer, "gpu": machine.name} for nodeid, answer in self._present.items()}


def _problem(report: pytest.TestReport) -> str:
    """Return the reason of a skip or failure in one line."""
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return next(filter(None, map(str.strip, text.splitlines())), report.outcome)


@contextmanager
def modules_compiled() -> Iterator[None]:
    """Compile the outermost modules called inside."""
    import torch

    call = torch.nn.Module.__call__
    made: list[torch.nn.Module] = []
    inside = False

    @functools.wraps(call)
    def compiling(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return call(self, *args, **kwargs)
        if self._compiled_call_impl is None:
            self.compile()
            made.append(self)
        inside = True
        try:
            return call(self, *args, **kwargs)
        finally:
            inside = False

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.nn.Module, "__call__", compiling)
        try:
            yield
        finally:
            for module in made:
                module._compiled_call_impl = None
