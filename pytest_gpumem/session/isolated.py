"""``isolate=True``: a test runs in a process of its own, which has been made ready in advance.

Python's fork server has imported torch and pytest by then and has never touched CUDA, so what it
forks may; where a system cannot fork, a new process is started instead. Fixtures that tests share
are set up anew in there. Options, environment and folder are those of the process that asks, and
the reports come back to it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

PRELOADED = ("pytest", "torch", "pytest_gpumem.session.isolated", "pytest_gpumem.session.ahead")

_ALONE: Mapping[str, Any] = {
    "collectonly": False,
    "deselect": None,
    "dist": "no",
    "failedfirst": False,
    "gpumem_report": None,
    "gpumem_share": False,
    "keyword": "",
    "lf": False,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "numprocesses": None,
    "stepwise": False,
    "tx": [],
    "usepdb": False,
}
"""Options that the process of a single test does not share."""


@dataclass(frozen=True)
class Job:
    """One test for another process."""

    test: str
    """Its id, with a path that holds from anywhere."""
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    folder: str
    worker: Mapping[str, Any]


class Isolation:
    """Runs the tests of one process that ask for one of their own."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        self._count = 0

    def prepare(self) -> None:
        """Let a standby process be made ready meanwhile."""
        if self._context.get_start_method() == "forkserver":
            from multiprocessing.forkserver import ensure_running

            self._context.set_forkserver_preload([*PRELOADED])
            ensure_running()

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run ``item`` elsewhere, and report of it as pytest would."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(there, self._job(item)))
        process.start()
        there.close()
        data: Sequence[Mapping[str, Any]] = ()
        problem = ""
        try:
            data, problem = here.recv()
        except EOFError:
            process.join()
            problem = _ended(process.exitcode)
        finally:
            here.close()
            process.join()
        read = self._config.hook.pytest_report_from_serializable
        reports = [read(config=self._config, data=one) for one in data]
        if not reports or problem:
            text = problem or "it has no such test: what is collected there differs"
            reports = [*reports[:1], _failed(item, f"the process of its own: {text}")]
        return reports

    def _job(self, item: pytest.Item) -> Job:
        config = self._config
        path, separator, name = item.nodeid.partition("::")
        self._count += 1
        options = {
            name: value
            for name, value in vars(config.option).items()
            if name != "file_or_dir" and _can_travel(value)
        }
        base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        return Job(
            test=f"{config.rootpath / path}{separator}{name}",
            options={
                **options,
                **_ALONE,
                "basetemp": str(base / f"isolated-{self._count}"),
                "inifilename": str(config.inipath) if config.inipath else None,
                "plugins": [*options.get("plugins", ()), "no:terminal"],
                "rootdir": str(config.rootpath),
            },
            environment=dict(os.environ),
            folder=str(Path.cwd()),
            worker=getattr(config, "workerinput", {"workerid": "master", "workercount": 1}),
        )


class _Collected:
    """The reports of the one test, in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.data: list[Mapping[str, Any]] = []
        self.problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write = self._config.hook.pytest_report_to_serializable
        self.data.append(write(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problem = report.longreprtext


def _serve(connection: Connection, job: Job) -> None:
    """Run a job's test, and send what became of it."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    config = pytest.Config.fromdictargs({**job.options}, [job.test])
    # As in a worker of pytest-xdist: what a run writes at its end is the other process's.
    worker: Any = config
    worker.workerinput, worker.workeroutput = dict(job.worker), {}
    collected = _Collected(config)
    config.pluginmanager.register(collected, "gpumem-isolated-reports")
    try:
        config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        collected.problem = str(error)
    connection.send((collected.data, collected.problem))
    connection.close()


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
    )


def _ended(exitcode: int | None) -> str:
    name = ""
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            name = f" by {signal.Signals(-exitcode).name}"
    return f"it ended{name} in the middle of the test (exit code {exitcode})"


def _can_travel(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a plugin keeps among the options
        return False
    return True
