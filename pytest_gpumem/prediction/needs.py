"""The needs of a suite's tests on each runner: from reports, baselines or a simulated run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.prediction.runners import PlannedTest, Rental
from pytest_gpumem.sharing.learned import FILE_NAME, IN_SHARDS, Learned, read_learned
from pytest_gpumem.sharing.weights import OF_PYTEST_SPLIT, read_weights
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.prediction.process import MachineResult
    from pytest_gpumem.values.environment import Environment

CACHE = Path(".pytest_cache", "d", "gpumem")
"""The default of pytest's cache, relative to the folder of the ini file."""

SIMULATED = "sim-"
"""Prefix of the keys of simulated environments."""

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by GPU, as in an environment, and node id."""


@dataclass(frozen=True)
class _Measured:
    """A test in one environment."""

    nodeid: str
    environment: Environment
    bytes: int | None
    """Peak reserved bytes; ``None`` if it did not run to its end."""
    seconds: float | None = None
    min_memory: int | None = None
    problem: str = ""


def needs_of(
    given: Sequence[str], runners: Sequence[Rental], durations: Path | None, *, dry: bool
) -> tuple[list[PlannedTest], tuple[str, ...]]:
    """Return the needs of tests on ``runners``, and sentences on their sources.

    ``given`` are JSON reports, or a folder of baselines, or else pytest's arguments: paths and node
    ids, which run on simulated or ``dry`` GPUs in a separate process. ``durations`` is a file of
    durations; without it, pytest's cache and pytest-split's file are read. Raises ``ValueError`` if
    these cannot be read, or tests cannot run.
    """
    paths = [Path(one) for one in given]
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    measured: list[_Measured] = []
    if paths and all(path.suffix == ".json" for path in paths):
        measured = [one for path in paths for one in _measured_in_report(path)]
        tests, source = _needs(measured, runners), "as measured by"
    elif folder and any(folder.rglob("*.json")) and not any(folder.rglob("*.py")):
        measured = list(_measured_in_baselines(folder))
        tests, source = _needs(measured, runners), "stored baselines of"
    else:
        tests, source = _run(given or ["."], runners, dry=dry)
    if not tests:
        raise ValueError(f"{', '.join(given)} holds no measured test, so there is nothing to plan")
    environments = ", ".join(sorted({one.environment.key for one in measured}))
    timed, durations_from = _timed(tests, runners, measured, durations)
    sources = f"needs: {source} {environments}".rstrip(), durations_from
    return sorted(timed, key=lambda test: test.nodeid), sources


def _measured_in_report(path: Path) -> Iterator[_Measured]:
    from pytest_gpumem.report.json_report import read_report

    for record in read_report(path):
        ran = record.judged or record.outcome == "passed"
        found = record.measurement
        yield _Measured(
            record.nodeid,
            record.environment,
            max(found.peak_reserved, found.peak_allocated, 0) if found and ran else None,
            # The duration of a test beside others depends on the others.
            None if record.beside else record.duration,
            record.expectation.get("min_memory"),
            "" if found and ran else f"it {record.outcome} where it was measured",
        )


def _measured_in_baselines(folder: Path) -> Iterator[_Measured]:
    from pytest_gpumem.baseline.store import read_folder

    for module, file in read_folder(folder):
        for name, entry in file.tests.items():
            size = max(entry.peak_reserved, entry.peak_allocated)
            yield _Measured(f"{module}::{name}", file.environment, size)


def _needs(measured: Iterable[_Measured], runners: Sequence[Rental]) -> list[PlannedTest]:
    """Return each test once, with its need as measured on a runner, else the largest anywhere."""
    by_test: dict[str, list[_Measured]] = defaultdict(list)
    for one in measured:
        by_test[one.nodeid].append(one)
    tests = []
    for nodeid, found in by_test.items():
        known = [one for one in found if one.bytes is not None]
        sizes = {}
        for runner in runners if known else ():
            names = (runner.model.name, runner.model.full_name)
            own = [one for one in known if one.environment.gpu in names]
            sizes[runner.name] = max(one.bytes or 0 for one in own or known)
        least = max(one.min_memory or 0 for one in found)
        refusals = {
            runner.name: f"asks for a GPU of {format_size(least)}"
            for runner in runners
            if runner.model.total_memory < least
        }
        problem = "" if known else found[0].problem
        tests.append(PlannedTest(nodeid, sizes, refusals=refusals, problem=problem))
    return tests


def _run(
    given: Sequence[str], runners: Sequence[Rental], *, dry: bool
) -> tuple[list[PlannedTest], str]:
    from importlib.metadata import version

    if find_spec("torch") is None:  # else a process would start only to report that
        raise ModuleNotFoundError("torch is not installed", name="torch")

    from pytest_gpumem.prediction.process import Request, run_tests
    from pytest_gpumem.simulated.gpu.catalogue import Machine

    try:
        machines = tuple(Machine(one.model, 1) for one in runners)
        answers = run_tests(Request(tuple(given), machines, unbounded=True, dry=dry))
    except ValueError as error:
        raise ValueError(f"{' '.join(given)} was not run: {error}") from error
    by_test: dict[str, list[MachineResult]] = defaultdict(list)
    for answer in answers:
        by_test[answer.nodeid].append(answer)
    release = ".".join(version("torch").split(".")[:2])
    source = f"simulated on each runner by the rules of torch {release}"
    if dry:
        source = f"dry on each runner, by torch {release}'s own CUDA code"
    return [_planned_test(nodeid, found) for nodeid, found in by_test.items()], source


def _planned_test(nodeid: str, answers: Sequence[MachineResult]) -> PlannedTest:
    sizes, refusals = {}, {}
    for answer in answers:
        if answer.measured and answer.record is not None:
            found = answer.record.measurement
            sizes[answer.gpu] = max(found.peak_reserved, found.peak_allocated, 0) if found else 0
            if not answer.fits:
                refusals[answer.gpu] = f"runs out of memory, needs {format_size(sizes[answer.gpu])}"
        elif answer.problem:
            refusals[answer.gpu] = answer.problem
        else:
            sizes[answer.gpu] = 0  # it allocates nothing there
    if sizes:
        return PlannedTest(nodeid, sizes, refusals=refusals)
    return PlannedTest(nodeid, problem=next(iter(refusals.values()), "it was not run"))


def _timed(
    tests: Iterable[PlannedTest],
    runners: Sequence[Rental],
    measured: Iterable[_Measured],
    durations: Path | None,
) -> tuple[list[PlannedTest], str]:
    """Return ``tests`` with durations, and a sentence on the source of the durations."""
    known, where = _durations(measured, durations)
    timed = []
    for test in tests:
        taken = {runner.name: _seconds_on(test.nodeid, known, runner) for runner in runners}
        seconds = {name: value for name, value in taken.items() if value is not None}
        timed.append(replace(test, seconds=seconds))
    count = sum(bool(test.seconds) for test in timed)
    if not count:
        return timed, "durations: unknown, so there is no time or cost; give --durations FILE"
    rest = len(timed) - count
    others = f"; {rest} unknown, taken for average" if rest else ""
    simulated = all(key.startswith(SIMULATED) for key, found in known.items() if found)
    real = ", where a real GPU differs" if simulated else ""
    keys = ", ".join(key for key, found in sorted(known.items()) if key and found)
    on = f" on {keys}{real}" if keys else ""
    return timed, f"durations: {where}{on}; of tests alone on their device{others}"


def _durations(
    measured: Iterable[_Measured], file: Path | None
) -> tuple[dict[str, dict[str, float]], str]:
    """Return seconds by environment key and node id, and the text on their source."""
    if file is not None:
        return {"": dict(read_weights(file).seconds)}, f"by {file}"
    known: dict[str, dict[str, float]] = defaultdict(dict)
    for one in measured:
        if one.seconds is not None:
            known[one.environment.key][one.nodeid] = one.seconds
    if known:
        return known, "as reported"
    learned = Learned()
    for name in (IN_SHARDS, FILE_NAME):
        learned.merge(read_learned(CACHE, name))
    for key, nodeid, cost in learned:
        if cost.seconds is not None:
            known[key][nodeid] = cost.seconds
    if known:
        return known, "of earlier runs, by pytest's cache"
    if Path(OF_PYTEST_SPLIT).is_file():
        return {"": dict(read_weights(Path(OF_PYTEST_SPLIT)).seconds)}, "by pytest-split"
    return {}, ""


def _seconds_on(nodeid: str, known: Seconds, runner: Rental) -> float | None:
    """Return a test's seconds on ``runner``: measured there, else on any GPU, else simulated."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", runner.model.full_name)
    ranked: dict[int, list[float]] = defaultdict(list)
    for key, tests in known.items():
        if nodeid in tests:
            own = key.startswith(f"cuda-{name}-torch")
            ranked[0 if own else 2 if key.startswith(SIMULATED) else 1].append(tests[nodeid])
    return max(ranked[min(ranked)]) if ranked else None
