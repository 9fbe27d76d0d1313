"""The end of a run, which writes baselines, reports, and the terminal's section."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from pytest_gpumem.baseline.collected import Collected, MeasuredTest, unused_baselines
from pytest_gpumem.baseline.store import BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.baseline.update import UpdateReport, update_baselines
from pytest_gpumem.option_values import ReportTarget
from pytest_gpumem.paths import relative
from pytest_gpumem.report.commands import Command
from pytest_gpumem.report.record import ReportedRun
from pytest_gpumem.report.remarks import Missing, leaks, unmarked
from pytest_gpumem.report.terminal import describe, section, write_section
from pytest_gpumem.session.results import Results
from pytest_gpumem.text import counted
from pytest_gpumem.values.environment import Environment

AT_IMPORT = "there a GPU that is simulated exists only with --gpumem-sim-scope=session"

_COLLECTING = (
    *("python_files", "python_classes", "python_functions", "norecursedirs", "testpaths"),
    *("collect_imported_tests", "consider_namespace_packages"),
)
"""Settings of pytest that determine the collected tests."""


class Conclusion:
    """The end of a run, written from the results of its tests."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._config = results.config
        self._settings = results.settings
        self._update: UpdateReport | None = None
        self._missing: Missing | None = None
        self._annotations: list[str] = []
        """Lines that the CI system reads from the terminal."""

    def finish(self, exitstatus: int) -> bool:
        """Write baselines and reports; return whether everything could be written."""
        # An interrupted session has not seen all tests, so no baseline can be called unused.
        complete = exitstatus not in (
            pytest.ExitCode.INTERRUPTED,
            pytest.ExitCode.INTERNAL_ERROR,
            pytest.ExitCode.USAGE_ERROR,
        )
        results, settings = self._results, self._settings
        errors = [*self._write_baselines(prune=complete), *self._write_reports()]
        if complete:
            errors += self._look_for_missing()
        results.notes += errors
        if results.by_run or settings.share or settings.shard:
            from pytest_gpumem.sharing.learned import keep

            costs = results.stopwatch.costs(results.by_run)
            if results.foreseen is not None:
                costs.merge(results.foreseen)
            if problem := keep(self._config, costs, in_shard=settings.shard is not None):
                results.notes.append(problem)
        return not errors

    def summarize(self) -> None:
        """Write the terminal's section, after the lines that the CI system reads."""
        results, writer = self._results, self._config.get_terminal_writer()
        for line in self._annotations:
            writer.line(line)
        records, notes = results.records, list(self._notes())
        if not records and not notes and self._update is None:
            return
        notes += leaks(records)
        if not self._settings.all:
            notes += unmarked(records)

        verbosity, option = self._config.get_verbosity(), self._config.option
        failures_are_shown = (
            not getattr(option, "no_summary", False) and getattr(option, "tbstyle", "") != "no"
        )
        lines = section(
            records,
            verbosity=verbosity,
            width=writer.fullwidth,
            update=self._update,
            notes=notes,
            command=Command.of(self._config),
            shown_above=failures_are_shown,
            missing=self._missing,
            rows=self._settings.rows,
            sort=self._settings.sort,
        )
        write_section(writer, lines, verbosity=verbosity)

    def _notes(self) -> Iterator[str]:
        """Yield the sentences on the run, its hosts, shared devices and skipped tests."""
        results = self._results
        yield from (*results.notes, *results.broken_plugins, *filter(None, [results.shard]))
        if len(results.environments) > 1:
            yield from differing(results.environments)
        shared = {one.nodeid: one.sharing for one in results.records if one.sharing}
        if results.usages or shared:
            from pytest_gpumem.sharing.usage import lines, waits

            yield from (*lines(results.usages), *waits(shared))
        yield from self._skips()
        if count := results.skipped_at_import:
            yield (
                f"{counted(count, 'test')} that would be measured {_were(count)} skipped by a "
                f"condition that was evaluated at import: {AT_IMPORT}"
            )
        if count := len(results.skipped_modules):
            yield (
                f"{counted(count, 'module')} {_were(count)} skipped by pytest.skip() as "
                f"{'they were' if count > 1 else 'it was'} imported: {AT_IMPORT}"
            )
        if count := len(results.failed_without_gpu):
            have, them = ("have", "them") if count > 1 else ("has", "it")
            yield (
                f"{counted(count, 'test')} failed because there is no GPU, and {have} no gpumem "
                f"marker, which would simulate one: mark {them} with @pytest.mark.gpumem, or run "
                "with --gpumem-all or --gpumem-sim-scope=session"
            )
        if count := len(results.failed_modules):
            yield (
                f"{counted(count, 'module')} failed because there is no GPU as "
                f"{'they were' if count > 1 else 'it was'} imported: {AT_IMPORT}"
            )
        if self._settings.device.kind == "off" and results.any_marked:
            yield "--gpumem-device=off: marked tests ran without being measured"

    def _skips(self) -> Iterator[str]:
        """Yield the causes of tests that could not be simulated, each once unless verbose."""
        causes: dict[str, list[str]] = {}
        for nodeid, why in self._results.unsimulated.items():
            cause = self._results.undescribed.get(nodeid, why)
            causes.setdefault(cause, []).append(nodeid)
        verbose = self._config.get_verbosity() > 0
        for tests in causes.values():
            more = 0 if verbose else len(tests) - 1
            also = f" and {counted(more, 'more test')}" if more else ""
            for nodeid in tests if verbose else tests[:1]:
                why = self._results.unsimulated[nodeid]
                yield f"{nodeid}{also} {_were(more + 1)} skipped: {why}"

    def _write_baselines(self, *, prune: bool) -> Iterator[str]:
        settings = self._settings
        prune = prune and settings.prune_baselines
        if settings.update_baselines is None and not prune:
            return
        self._update = update_baselines(
            BaselineStore(settings.baselines),
            list(self._measured_tests()),
            mode=settings.update_baselines,
            prune=prune,
            collected=self._collection(),
        )
        yield from self._update.errors

    def _look_for_missing(self) -> Iterator[str]:
        """Find baselines that no test uses; yield the errors where baselines are required."""
        settings = self._settings
        if settings.prune_baselines or not any(one.expectation for one in self._results.records):
            return
        store, tests = BaselineStore(settings.baselines), list(self._measured_tests())
        self._missing = Missing(
            unused_baselines(store, tests, self._collection()),
            _stored_elsewhere(store, tests),
            relative(settings.baselines, self._config.invocation_params.dir).replace(os.sep, "/"),
        )
        moved = self._missing.moved
        if moved and settings.require_baselines and settings.update_baselines is None:
            yield (
                f"{counted(moved, 'test')} {_were(moved)} compared with nothing, because "
                "what is stored has another name, which fails this run as baselines are required"
            )

    def _measured_tests(self) -> Iterator[MeasuredTest]:
        for run, record in self._results.by_run.items():
            if record.measurement is not None and record.expectation:
                yield MeasuredTest(
                    nodeid=record.nodeid,
                    environment=record.environment,
                    measurement=record.measurement,
                    passed=record.outcome == "passed" and run not in self._results.failed,
                    rerun=run in self._results.reruns,
                    subtest_failed=run in self._results.subtest_failed,
                    wanted=record.expectation["baseline"] is not False,
                    tolerance=record.expectation["tolerance"],
                )

    def _collection(self) -> Collected:
        """Return the tests that exist, as far as this session can determine."""
        config, option, root = self._config, self._config.option, self._config.rootpath
        if getattr(option, "lf", False):  # it leaves tests out while a module is collected
            return Collected(root, (), partial="--lf was given")
        given = getattr(option, "override_ini", None) or ()
        overridden = {setting.partition("=")[0] for setting in given}
        narrowed = next((f"-o {name} was given" for name in _COLLECTING if name in overridden), "")
        partial = ""
        if config.args_source is pytest.Config.ArgsSource.ARGS:
            partial = "paths were given"
        elif getattr(option, "ignore", None) or getattr(option, "ignore_glob", None):
            partial = "--ignore was given"
        incomplete = dict(self._results.incomplete)
        for path in (arg.partition("::")[0] for arg in config.args if "::" in arg):
            module = relative((config.invocation_params.dir / path).resolve(), root)
            incomplete[module.replace(os.sep, "/")] = "tests of it were given by id"
        return Collected(root, self._results.existing, incomplete, partial, narrowed)

    def _write_reports(self) -> Iterator[str]:
        results = self._results
        targets = [one for one in self._settings.reports if results.by_run or not one.unasked]
        if not targets:
            return
        device = self._config.getoption("gpumem_device", None)
        records = results.records
        if self._update is not None and self._update.has_recorded:
            records = [replace(record, missing_baseline=False) for record in records]
        run = ReportedRun(
            records,
            root=self._config.rootpath,
            lines=results.lines,
            skipped=results.unsimulated,
            usage=[usage.to_dict() for usage in results.usages],
            # A report is read at the rootdir, on another machine.
            command=f"pytest --gpumem-device={device}" if device else "pytest",
        )
        for target in targets:
            folder = target.path.parent if target.path and not target.unasked else None
            is_new = folder is not None and not folder.exists()
            try:
                self._annotations += _write(target, run)
            except ValueError as error:
                yield f"the exit status is not 0, because {error}"
            if is_new and folder and folder.exists():
                results.notes.append(f"{folder} did not exist and was made for the report in it")


def _write(target: ReportTarget, run: ReportedRun) -> Sequence[str]:
    """Write one report and return the lines that the terminal has to show for it.

    Raises ``ValueError`` where it cannot be written.
    """
    from pytest_gpumem.report import json_report

    if target.kind == "github":
        from pytest_gpumem.report.github import workflow_commands, write_summary

        write_summary(run)
        return workflow_commands(run)
    assert target.path is not None
    if target.kind == "json":
        json_report.write_report(target.path, run.records, run.usage)
    elif target.kind == "html":
        from pytest_gpumem.report.html.page import render

        page = render(run.records, usage=run.usage)
        json_report.write_file(target.path, page.encode(), "--gpumem-report html:PATH")
    else:
        from pytest_gpumem.report.markdown import document

        text = document(run.records, command=run.command, skipped=run.skipped)
        json_report.write_file(target.path, text.encode(), "--gpumem-report markdown:PATH")
    return ()


def _were(count: int) -> str:
    return "were" if count > 1 else "was"


def _stored_elsewhere(store: BaselineStore, tests: Sequence[MeasuredTest]) -> Counter[str]:
    """Return, by environment, how many tests have a baseline there and none in their own."""
    found: Counter[str] = Counter()
    for test in tests:
        module, test_id = split_nodeid(test.nodeid)
        try:
            if not test.wanted or test_id in store.load(test.environment, module):
                continue
            known = store.elsewhere(module, test_id, test.environment)
        except BaselineError:
            continue
        found.update(environment.key for environment, _ in known)
    return found


def differing(environments: Mapping[str, Iterable[Environment]]) -> Iterator[str]:
    """Yield a line on each environment and its workers, if the workers' environments differ.

    ``environments`` are by worker. The header describes the controller, whose devices may differ.
    Different simulated models on one worker do not count as different environments.
    """
    places: dict[frozenset[Environment], list[str]] = {}
    for worker, seen in environments.items():
        hosts = frozenset(
            replace(one, gpu="GPU", compute_capability="") if one.simulated else one for one in seen
        )
        places.setdefault(hosts, []).append(worker)
    if len(places) > 1:
        for hosts, workers in sorted(places.items(), key=lambda place: min(place[1])):
            where = " and ".join(sorted(map(describe, hosts)))
            yield f"{', '.join(sorted(workers))}: {where}"
