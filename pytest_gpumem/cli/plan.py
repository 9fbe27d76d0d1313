"""``gpumem plan --runner MODEL:PRICE``: the GPU that each test needs, and the cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.cli.command import Answer, Argument, Command, above_zero, table, terminal_width
from pytest_gpumem.cli.target import CUDA, DEVICE, DRY, DeviceOption
from pytest_gpumem.jsonfile import replace_file
from pytest_gpumem.prediction.needs import needs_of
from pytest_gpumem.prediction.runners import Job, Plan, PlannedTest, Rental, make_plan, parse_runner
from pytest_gpumem.sharing.devices import CONTEXT, LEFT_FREE
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted, listed, shorten, wrap

MOST_LISTED = 10
"""The most tests of one kind that are named."""


def run(arguments: argparse.Namespace) -> Answer:
    """Make the plan; raises ``ValueError`` for bad input."""
    runners = [parse_runner(text) for text in arguments.runner]
    device: DeviceOption = arguments.device
    if device.kind == CUDA or device.model is not None:
        raise ValueError("plan runs tests on the GPUs of --runner: write --device sim or dry")
    dry = device.kind == DRY
    tests, sources = needs_of(arguments.tests, runners, arguments.durations, dry=dry)
    limit = None if arguments.minutes is None else arguments.minutes * 60
    plan = make_plan(tests, runners, limit=limit, startup=arguments.startup * 60)
    if arguments.output is not None:
        replace_file(arguments.output, f"{json.dumps(plan.shards(), indent=1)}\n".encode("ascii"))
    return Answer(
        lines(plan, sources, arguments.minutes, terminal_width()),
        lambda: as_dict(plan, sources),
        failed=bool(plan.nowhere or plan.late),
    )


def lines(plan: Plan, sources: Sequence[str], minutes: float | None, width: int) -> Iterator[str]:
    """Yield the lines of output."""
    yield from wrap(_headline(plan), width)
    yield ""
    yield from table(list(_rows(plan)), left=(0,), given_up=(2, 1), width=width)
    yield ""
    yield from wrap(_total(plan, minutes), width)
    for runner in plan.runners:
        outside = [(test, test.obstacle(runner)) for test in plan.tests]
        only = [(test, why) for test, why in outside if why and test not in plan.nowhere]
        yield from _listed(f"not on {_a(runner.name)}", only, width)
    unknown = [(test, test.problem) for test in plan.tests if test.problem]
    yield from _listed("not known what they need, so they run where there is most", unknown, width)
    largest = max(plan.runners, key=lambda runner: runner.memory)
    nowhere = [(test, test.obstacle(largest)) for test in plan.nowhere]
    yield from _listed("on no runner", nowhere, width)
    late = [(test, "") for test in plan.tests if test.nodeid in plan.late]
    yield from _listed("longer than there is time", late, width)
    yield ""
    taken = f"{LEFT_FREE:.0%} and {format_size(CONTEXT)} of context"
    room = f"room for tests: a GPU's memory less {taken}"
    for sentence in (room, *sources):
        yield from wrap(sentence, width, rest="  ")


def as_dict(plan: Plan, sources: Sequence[str]) -> dict[str, Any]:
    """Return everything as builtin types; sizes in bytes, times in seconds."""
    return {
        "runners": [
            {
                "name": runner.name,
                "price": runner.price,
                "memory": runner.memory,
                "fit": plan.fitting(runner),
                "machines": len(_jobs_on(plan, runner)),
            }
            for runner in plan.runners
        ],
        "machines": [
            {
                "runner": job.runner.name,
                "seconds": job.seconds,
                "cost": job.cost,
                "tests": list(job.tests),
            }
            for job in plan.jobs
        ],
        "tests": [
            {
                "nodeid": test.nodeid,
                "bytes": dict(test.bytes),
                "seconds": dict(test.seconds),
                "obstacles": {
                    runner.name: why for runner in plan.runners if (why := test.obstacle(runner))
                },
                "problem": test.problem,
            }
            for test in plan.tests
        ],
        "nowhere": [test.nodeid for test in plan.nowhere],
        "late": list(plan.late),
        "cost": plan.cost,
        "seconds": plan.seconds,
        "sources": list(sources),
    }


def _headline(plan: Plan) -> str:
    """Return the first sentence: ``97 of your 100 tests fit a T4, 99 an L4, all an H100``."""
    total = len(plan.tests)
    fitting = {_a(runner.name): plan.fitting(runner) for runner in plan.runners}
    if total == 1:
        fits = [name for name, count in fitting.items() if count]
        others = [name for name, count in fitting.items() if not count]
        if not fits:
            return f"your test fits no {' and no '.join(runner.name for runner in plan.runners)}"
        return f"your test fits {listed(fits)}" + (f", not {listed(others)}" if others else "")
    words = {0: "none", total: "all"}
    counts = [f"{words.get(count, count)} {name}" for name, count in fitting.items()]
    count, name = counts[0].split(" ", 1)
    verb = "fits" if count in ("none", "1") else "fit"
    return ", ".join([f"{count} of your {total} tests {verb} {name}", *counts[1:]])


def _rows(plan: Plan) -> Iterator[list[str]]:
    yield ["GPU", "an hour", "for tests", "fit", "run", "machines", "minutes", "cost"]
    for runner in plan.runners:
        jobs = _jobs_on(plan, runner)
        times = [job.seconds for job in jobs if job.seconds is not None]
        costs = [job.cost for job in jobs if job.cost is not None]
        yield [
            runner.name,
            f"{runner.price:.2f}",
            format_size(runner.memory),
            str(plan.fitting(runner)),
            str(sum(len(job.tests) for job in jobs)),
            str(len(jobs)),
            _minutes(max(times)) if times else "-",
            f"{sum(costs):.2f}" if costs else "-",
        ]


def _total(plan: Plan, minutes: float | None) -> str:
    machines = counted(len(plan.jobs), "machine")
    if plan.cost is None or plan.seconds is None:
        return f"{machines}; what they take and cost is not known"
    wanted = f" of the {minutes:g} that they have" if minutes is not None else ""
    return f"{machines}, {_minutes(plan.seconds)} minutes{wanted}, {plan.cost:.2f} a run"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds >= 3 else "<0.1"


def _listed(heading: str, tests: Sequence[tuple[PlannedTest, str]], width: int) -> Iterator[str]:
    if not tests:
        return
    yield ""
    yield f"{heading}:"
    for test, why in tests[:MOST_LISTED]:
        reason = f"  {shorten(why, max(width // 2, 1))}" if why else ""
        yield f"  {shorten(test.nodeid, width - 2 - len(reason))}{reason}"
    if len(tests) > MOST_LISTED:
        yield f"  and {len(tests) - MOST_LISTED} more (--json has all)"


def _jobs_on(plan: Plan, runner: Rental) -> list[Job]:
    return [job for job in plan.jobs if job.runner == runner]


def _a(name: str) -> str:
    """Return ``name`` with the article for its spoken first letter."""
    return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"


COMMAND = Command(
    description="Show which tests fit which GPU, and assign each to the cheapest that it fits. "
    "No GPU is needed. Exit code 1 where a test fits none of the runners, or takes longer than "
    "--minutes.",
    run=run,
    arguments=(
        Argument(
            "tests REPORT|TESTS",
            "JSON reports, a folder of baselines, or paths and test ids, which run on "
            "simulated GPUs (default: all tests of the current folder)",
            nargs="*",
        ),
        Argument(
            "--runner MODEL:PRICE...",
            "an available GPU and its price per hour, like T4:0.35; one option for each kind",
            required=True,
        ),
        DEVICE,
        Argument("--minutes N", "time limit of every machine", type=above_zero("minutes")),
        Argument(
            "--startup N",
            "minutes that each machine takes before its first test (default: 0)",
            type=above_zero("minutes"),
            default=0.0,
        ),
        Argument(
            "--durations FILE",
            "durations of tests: a JSON report, an earlier plan or a file of pytest-split "
            "(default: the reports themselves, else pytest's cache)",
            type=Path,
        ),
        Argument("--output FILE", "write the shards as JSON, for a matrix of jobs", type=Path),
    ),
    examples=("gpumem plan --runner T4:0.35 --runner H100:4.10 --minutes 10 report.json",),
)
