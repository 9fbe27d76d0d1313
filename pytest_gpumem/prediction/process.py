"""Tests on simulated GPUs, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpumem.prediction.child import INI, RAN_OUT, REQUEST, UNBOUNDED, Request
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.simulated.gpu.catalogue import Machine
from pytest_gpumem.values.plain import Plain


class PredictionError(ValueError):
    """A program that cannot be predicted; the message is one sentence for the user."""


@dataclass(frozen=True)
class Answer(Plain):
    """The result of one test on one simulated machine."""

    nodeid: str
    gpu: str
    record: TestRecord | None
    """The test's record; ``None`` where it was not measured."""
    fits: bool
    """Whether memory sufficed; if not, it ran again with unlimited memory, if requested."""
    problem: str
    """The reason of a skip or failure; where only a verdict failed it, its numbers are valid."""

    @property
    def ran_out(self) -> bool:
        """Whether it ended because memory did not suffice."""
        return self.problem == RAN_OUT

    @property
    def measured(self) -> bool:
        """Whether the body ran to its end on the device."""
        record = self.record
        return record is not None and (record.judged or record.outcome == "passed")


def run_tests(
    tests: Sequence[str],
    machines: Sequence[Machine],
    *,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    unbounded: bool = False,
    options: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    modules_compiled: bool = False,
    dry: bool = False,
) -> list[Answer]:
    """Run ``tests`` on each of ``machines``; the caller's process is not changed.

    ``tests`` are node ids relative to ``folder``, or with absolute paths; ``arguments`` are those
    of the calling pytest, and ``options`` values of its ``config.option``, by name. With
    ``unbounded`` a test that runs out of memory runs again with unlimited memory. After so many
    ``seconds`` no other test begins, and a running one gets as long again. With
    ``modules_compiled`` each module that a test calls is compiled. Raises :class:`PredictionError`
    where pytest does not get as far as running tests. With ``dry`` each machine is a dry device, in
    a process of its own.
    """
    if dry:
        return _run_dry(tests, machines, arguments, folder, unbounded=unbounded)
    return _run(
        tests,
        machines,
        arguments,
        folder,
        unbounded=unbounded,
        options=options,
        seconds=seconds,
        modules_compiled=modules_compiled,
    )


def _run_dry(
    tests: Sequence[str],
    machines: Sequence[Machine],
    arguments: Sequence[str],
    folder: Path | None,
    *,
    unbounded: bool,
) -> list[Answer]:
    found = []
    for machine in machines:
        for answer in _run(tests, [machine], arguments, folder, variables=_dry(machine)):
            if unbounded and answer.ran_out:
                large = _dry(machine, UNBOUNDED)
                (again,) = _run([answer.nodeid], [machine], arguments, folder, variables=large)
                answer = replace(again, fits=False)
            found.append(answer)
    return found


def _dry(machine: Machine, memory: int | None = None) -> Mapping[str, str]:
    from pytest_gpumem.dry.load import environment
    from pytest_gpumem.dry.torch_build import DryError

    try:
        return environment(machine.model.name, memory)
    except DryError as error:
        raise PredictionError(f"--device dry: {error}") from None


def _run(
    tests: Sequence[str],
    machines: Sequence[Machine],
    arguments: Sequence[str],
    folder: Path | None,
    *,
    unbounded: bool = False,
    options: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    modules_compiled: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[Answer]:
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        request = Request(
            tuple(tests),
            tuple(machines),
            own / "answer.json",
            unbounded,
            str(own / "tmp"),
            dict(options or {}),
            seconds,
            modules_compiled,
            dry=variables is not None,
        )
        request.to_file(own / "request.json")
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", *_arguments(arguments, own)],
                cwd=folder,
                env={**os.environ, **(variables or {}), REQUEST: str(own / "request.json")},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=None if seconds is None else 2 * seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise PredictionError(f"it takes longer than {2 * (seconds or 0):.0f} s") from error
        if not request.answer.is_file():
            raise PredictionError(_last_words(ran))
        answers = json.loads(request.answer.read_text(encoding="utf-8"))
        if not answers:
            raise PredictionError(_last_words(ran))
    return [Answer.from_dict(answer) for answer in answers]


def _arguments(given: Sequence[str], folder: Path) -> list[str]:
    """Return ``given`` with this module's options; only tests follow ``--``."""
    end = list(given).index("--") if "--" in given else len(given)
    ini = [f"cache_dir={folder / 'cache'}", *INI]
    own = ["-p", "pytest_gpumem.prediction.child", *(arg for text in ini for arg in ("-o", text))]
    return [*given[:end], *own, *given[end:]]


def _last_words(ran: subprocess.CompletedProcess[str]) -> str:
    """Return pytest's first error, else its last line."""
    lines = [*ran.stderr.splitlines(), *ran.stdout.splitlines()]
    said = [line.strip() for line in lines if line.strip(" =")]
    errors = [line for line in said if line.startswith(("ERROR", "E  "))]
    return (errors or said[-1:] or [f"pytest ended with code {ran.returncode}"])[0].strip("= ")
