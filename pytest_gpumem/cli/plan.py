"""``gpumem plan --runner MODEL:PRICE``: the GPU that each test needs, and the cost."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.cli.columns import UNLIMITED, table, terminal_width
from pytest_gpumem.cli.command import Answer, Command, argument
from pytest_gpumem.cli.device import CUDA, DRY, DeviceOption, device_argument
from pytest_gpumem.jsonfile import replace_file
from pytest_gpumem.prediction.needs import Needs, needs_of
from pytest_gpumem.prediction.runners import Job, Plan, PlannedTest, Runner, make_plan, parse_runner
from pytest_gpumem.sharing.host import CONTEXT, MARGIN
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import shorten, wrap

INCOMPLETE = 1
MOST_LISTED = 10
"""The most tests of one kind that are named."""


def run(arguments: argparse.Namespace) -> Answer:
    """Make the plan; raises ``ValueError`` for bad input."""
    runners = [parse_runner(text) for text in arguments.runner]
    device: DeviceOption = arguments.device
    if device.kind == CUDA or device.model is not None:
        raise ValueError("plan runs tests on the GPUs of --runner: write --device sim or dry")
    dry = device.kind == DRY
    needs = needs_of(arguments.tests, runners, arguments.durations, dry=dry)
    limit = None if arguments.minutes is None else arguments.minutes * 60
    plan = make_plan(needs.tests, runners, limit=limit, startup=arguments.startup * 60)
    if arguments.output is not None:
        replace_file(arguments.output, f"{json.dumps(plan.shards(), indent=1)}\n".encode("ascii"))
    return Answer(
        lines(plan, needs, arguments.minutes, terminal_width()),
        lambda: as_dict(plan, needs),
        INCOMPLETE if plan.nowhere or plan.late else 0,
    )


def lines(
    plan: Plan, needs: Needs, minutes: float | None = None, width: int = UNLIMITED
) -> Iterator[str]:
    """Yield the lines of output."""
    yield from wrap(_headline(plan), width)
    yield ""
    yield from table(list(_rows(plan)), left=(0,), given_up=(2, 1), width=width)
    yield ""
    yield from wrap(_total(plan, minutes), width)
    for runner in plan.runners:
        outside = [(test, test.obstacle(runner)) for test in plan.tests]
        told = [(test, why) for test, why in outside if why and test not in plan.nowhere]
        yield from _named(f"not on {_a(runner.name)}", told, width)
    unknown = [(test, test.problem) for test in plan.tests if test.problem]
    yield from _named("not known what they need, so they run where there is most", unknown, width)
    nowhere = [(test, test.obstacle(_largest(plan))) for test in plan.nowhere]
    yield from _named("on no runner", nowhere, width)
    late = [test for test in plan.tests if test.nodeid in plan.late]
    yield from _named("longer than there is time", [(test, "") for test in late], width)
    yield ""
    room = f"room for tests: a GPU's memory less {MARGIN:.0%} and {format_size(CONTEXT)} of context"
    for sentence in (room, *needs.sources):
        yield from wrap(sentence, width, rest="  ")


def as_dict(plan: Plan, needs: Needs) -> dict[str, Any]:
    """Return everything as builtin types; sizes in bytes, times in seconds."""
    return {
        "runners": [
            {
                "name": runner.name,
                "price": runner.price,
                "memory": runner.memory,
                "fit": plan.fitting(runner),
                "machines": len(_of(plan, runner)),
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
        "tests": [_test(test, plan) for test in plan.tests],
        "nowhere": [test.nodeid for test in plan.nowhere],
        "late": list(plan.late),
        "cost": plan.cost,
        "seconds": plan.seconds,
        "sources": list(needs.sources),
    }


def _test(test: PlannedTest, plan: Plan) -> dict[str, Any]:
    obstacles = {runner.name: test.obstacle(runner) for runner in plan.runners}
    return {
        "nodeid": test.nodeid,
        "bytes": dict(test.bytes),
        "seconds": dict(test.seconds),
        "obstacles": {name: why for name, why in obstacles.items() if why},
        "problem": test.problem,
    }


def _headline(plan: Plan) -> str:
    """Return the sentence of all: ``97 of your 100 tests fit a T4, 99 an L4, all an H100``."""
    total = len(plan.tests)
    noun = "test" if total == 1 else "tests"
    first, *others = plan.runners
    counts = [f"{plan.fitting(first)} of your {total} {noun} fit {_a(first.name)}"]
    for runner in others:
        count = plan.fitting(runner)
        counts.append(f"{'all' if count == total else count} {_a(runner.name)}")
    return ", ".join(counts)


def _rows(plan: Plan) -> Iterator[list[str]]:
    yield ["GPU", "an hour", "for tests", "fit", "run", "machines", "minutes", "cost"]
    for runner in plan.runners:
        jobs = _of(plan, runner)
        times = [job.seconds for job in jobs if job.seconds is not None]
        costs = [job.cost for job in jobs if job.cost is not None]
        yield [
            runner.name,
            f"{runner.price:.2f}",
            format_size(runner.memory),
            str(plan.fitting(runner)),
            str(sum(len(job.tests) for job in jobs)),
            str(len(jobs)),
            f"{max(times) / 60:.1f}" if times else "-",
            f"{sum(costs):.2f}" if costs else "-",
        ]


def _total(plan: Plan, minutes: float | None) -> str:
    count = len(plan.jobs)
    machines = f"{count} machine{'s' * (count != 1)}"
    if plan.cost is None or plan.seconds is None:
        return f"{machines}; what they take and cost is not known"
    wanted = f" of the {minutes:g} that they have" if minutes is not None else ""
    return f"{machines}, {plan.seconds / 60:.1f} minutes{wanted}, {plan.cost:.2f} a run"


def _named(heading: str, tests: Sequence[tuple[PlannedTest, str]], width: int) -> Iterator[str]:
    if not tests:
        return
    yield ""
    yield f"{heading}:"
    for test, why in tests[:MOST_LISTED]:
        reason = shorten(why, max(width // 2, 1))
        room = width - 2 - (len(reason) + 2 if reason else 0)
        yield f"  {shorten(test.nodeid, room)}{f'  {reason}' if reason else ''}"
    if len(tests) > MOST_LISTED:
        yield f"  and {len(tests) - MOST_LISTED} more (--json has all)"


def _of(plan: Plan, runner: Runner) -> list[Job]:
    return [job for job in plan.jobs if job.runner == runner]


def _largest(plan: Plan) -> Runner:
    return max(plan.runners, key=lambda runner: runner.memory)


def _a(name: str) -> str:
    """Return ``name`` with its article, as it is spoken letter by letter."""
    return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return minutes


COMMAND = Command(
    description="Say which tests fit which GPU, and place each on the cheapest that it fits. "
    "No GPU is needed. Exit code 1 where a test fits none of the runners, or takes longer than "
    "there is time.",
    run=run,
    arguments=(
        argument(
            "tests",
            metavar="REPORT|TESTS",
            nargs="*",
            help="JSON reports, a folder of baselines, or paths and test ids, which run on "
            "simulated "
            "GPUs (default: all tests of the current folder)",
        ),
        argument(
            "--runner",
            metavar="MODEL:PRICE",
            action="append",
            required=True,
            help="a GPU to be had and the price of an hour, like T4:0.35; give one for each kind",
        ),
        device_argument(),
        argument(
            "--minutes", metavar="N", type=_minutes, help="in which every machine is to be done"
        ),
        argument(
            "--startup",
            metavar="N",
            type=_minutes,
            default=0.0,
            help="minutes that each machine takes before its first test (default: 0)",
        ),
        argument(
            "--durations",
            metavar="FILE",
            type=Path,
            help="what tests take: a JSON report, an earlier plan or a file of pytest-split "
            "(default: "
            "the reports themselves, else pytest's cache)",
        ),
        argument(
            "--output",
            metavar="FILE",
            type=Path,
            help="write the shards as JSON, for a matrix of jobs",
        ),
    ),
    examples=("gpumem plan --runner T4:0.35 --runner H100:4.10 --minutes 10 report.json",),
)
