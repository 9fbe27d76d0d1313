"""``isolate=True``: a test runs in a process of its own, which has been prepared in advance.

Each rank of a test with ``ranks=`` also gets a process, where there is a GPU for each: they run as
if torchrun had started them, with a common store; see ``session.launched``.

The process is forked from Python's fork server, which has imported torch and pytest but not
initialised CUDA, so that its children may; where a system cannot fork, a new process starts.
Shared fixtures are set up again in the process. It gets the options, environment and working
directory of the process that requests it, and sends its reports there.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.dry import scope
from pytest_gpumem.values.world import World

PRELOADED = ("pytest", "torch", "pytest_gpumem.session.isolated", "pytest_gpumem.session.prepare")

_GRACE = 10.0
"""Seconds that the other processes may still run when one has ended during the test."""

_OPTIONS_OF_ONE_TEST: Mapping[str, Any] = {
    **dict.fromkeys(("collectonly", "gpumem_share", "looponfail", "usepdb"), False),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise"), False),
    **dict.fromkeys(("deselect", "gpumem_report", "numprocesses")),
    **dict.fromkeys(("keyword", "markexpr"), ""),
    "dist": "no",
    "maxfail": 0,
    "tx": [],
}
"""Options that are not passed on to the process of a single test."""


def prepare() -> Any:
    """Start the fork server in the background; return the context in which processes start."""
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" not in methods:
        return multiprocessing.get_context("spawn")
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    # The server imports torch, so a dry device has to be there when it starts.
    with scope.opened():
        ensure_running()
    return context


def run(
    item: pytest.Item, nextitem: pytest.Item | None, processes: int, *, are_ranks: bool
) -> None:
    """Run ``item`` in ``processes`` new processes, and report on it as pytest would."""
    context = prepare()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with _environments(processes, are_ranks) as environments:
        reports = _reports(item, environments, context)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _reports(
    item: pytest.Item, environments: Sequence[Mapping[str, str]], context: Any
) -> list[pytest.TestReport]:
    """Return the reports of the first process; there is one for each environment."""
    started: dict[Connection, Any] = {}
    """The processes by their connection, in the order of ranks."""
    try:
        for environment in environments:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(sender, *_job(item, environment)))
            process.start()
            sender.close()
            started[receiver] = process
        data, problem = _receive_reports(started)
    finally:
        for connection in started:
            connection.close()
        for process in started.values():
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
    read = item.config.hook.pytest_report_from_serializable
    reports = [read(config=item.config, data=one) for one in data]
    if not reports or problem:
        text = problem or "it has no such test: what is collected there differs"
        name = "" if len(environments) > 1 else "the process of its own: "
        failure = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"{name}{text}", "call"
        )
        reports = [*reports[:1], failure]
    return reports


def _job(item: pytest.Item, environment: Mapping[str, str]) -> tuple[Any, ...]:
    """Return the arguments of :func:`_serve` after the connection."""
    config = item.config
    path, separator, name = item.nodeid.partition("::")
    options = {
        name: value
        for name, value in vars(config.option).items()
        if name != "file_or_dir" and _is_picklable(value)
    }
    factory = getattr(config, "_tmp_path_factory", None)  # none with -p no:tmpdir
    options |= {
        **_OPTIONS_OF_ONE_TEST,
        "basetemp": str(factory.mktemp("isolated")) if factory else None,
        "inifilename": str(config.inipath) if config.inipath else None,
        "plugins": [*options.get("plugins", ()), "no:terminal"],
        "rootdir": str(config.rootpath),
    }
    test = f"{config.rootpath / path}{separator}{name}"
    return test, options, {**os.environ, **environment}, Path.cwd(), _worker(config)


def _worker(config: pytest.Config) -> Mapping[str, Any]:
    """Return the input that a worker of pytest-xdist would receive."""
    if hasattr(config, "workerinput"):
        # Not the channel of shared devices: the child shares none.
        received = config.workerinput.items()
        return {name: value for name, value in received if _is_picklable(value)}
    own: dict[str, Any] = {
        "workerid": "master",
        "workercount": 1,
        # What pytest-randomly and pytest-cov read in any worker.
        "randomly_seed": getattr(config.option, "randomly_seed", None),
        "cov_master_host": socket.gethostname(),
        "cov_master_topdir": str(Path.cwd()),
    }
    node = SimpleNamespace(config=config, workerinput=own)
    hook = getattr(config.hook, "pytest_configure_node", None)
    for implementation in hook.get_hookimpls() if hook is not None else ():
        # In a worker, only this plugin's pytest_configure reads the values that this hook sets.
        if type(implementation.plugin).__module__ == "pytest_rerunfailures":
            implementation.function(node)
    return own


def _receive_reports(started: Mapping[Connection, Any]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the reports of the first of the ``started`` processes, and an error of any of them.

    If one ends during the test, the others may wait for it forever, so they get a limited time to
    report.
    """
    data: Sequence[Mapping[str, Any]] = ()
    ended: list[str] = []
    problem = ""
    ranks, pending = list(started), list(started)
    until: float | None = None
    while pending:
        rest = None if until is None else max(until - time.monotonic(), 0.0)
        ready = wait(pending, rest)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks.index(connection)
            pending.remove(connection)
            try:
                reports, wrong = connection.recv()
            except EOFError:
                started[connection].join()
                name = f"rank {rank} of {len(ranks)}: " if len(ranks) > 1 else ""
                ended.append(f"{name}{_end_message(started[connection].exitcode)}")
                until = until or time.monotonic() + _GRACE
                continue
            data = reports if rank == 0 else data
            problem = problem or wrong
    return data, "; ".join(ended) or problem


class _Collected:
    """The reports of the one test, in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.data: list[Mapping[str, Any]] = []
        self.problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write = self._config.hook.pytest_report_to_serializable
        self.data.append(write(config=self._config, report=report))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, pytest.exit.Exception):
            self.problem = str(excinfo.value)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.problem = excinfo.exconly()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problem = report.longreprtext


def _serve(
    connection: Connection,
    test: str,
    options: dict[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    worker: Mapping[str, Any],
) -> None:
    """Run ``test``, an id with an absolute path, and send its reports."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    config = pytest.Config.fromdictargs(options, [test])
    # As in a worker of pytest-xdist: the requesting process writes the files of a run.
    vars(config).update(workerinput=dict(worker), workeroutput={})
    collected = _Collected(config)
    config.pluginmanager.register(collected, "gpumem-isolated-reports")
    try:
        config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        collected.problem = str(error)
    connection.send((collected.data, collected.problem))
    connection.close()


@contextmanager
def _environments(processes: int, are_ranks: bool) -> Iterator[Sequence[Mapping[str, str]]]:
    """Yield the environment variables of each of ``processes``; ranks share a store."""
    if not are_ranks:
        yield [{}]
        return
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served = {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "pytest-gpumem"}
    worlds = [World(processes, rank, local_size=processes) for rank in range(processes)]
    yield [{**world.environment, **served} for world in worlds]
    del store


def _end_message(exitcode: int | None) -> str:
    name = ""
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            name = f" by {signal.Signals(-exitcode).name}"
    return f"it ended{name} in the middle of the test (exit code {exitcode})"


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an option of another plugin may have any value
        return False
    return True
