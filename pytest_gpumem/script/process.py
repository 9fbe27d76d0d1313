"""The process in which a script runs, started again where one run does not suffice."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpumem.script import request as endings
from pytest_gpumem.script.entry import Script, ScriptError
from pytest_gpumem.script.request import Answer, Request

_MADE_UP = "it failed after it read a value that is not computed"

GRACE = 120.0
"""Seconds that a script may take to end after it has been stopped, start and answer included."""

STDERR = 2

_PACKAGE = Path(__file__).resolve().parents[2]
_PROGRAM = """\
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[0] = sys.argv[1]
from pytest_gpumem.script.child import main
main(sys.argv[2])
"""
"""The child's start; it makes Ctrl-C end the process silently until the script begins."""


@dataclass(frozen=True)
class Settings:
    """The length of a script's run, and the destination of its output."""

    steps: int = 2
    seconds: float = 60.0
    quiet: bool = False
    """Whether its output goes to stderr."""


@dataclass(frozen=True)
class Result:
    """The results of a script on one GPU."""

    answer: Answer
    fits: bool = True
    larger: Answer | None = None
    """The answer of a second run with unlimited memory, if the script does not fit."""

    @property
    def told(self) -> Answer:
        """The answer whose numbers are the script's."""
        return self.larger or self.answer


def run_on(script: Script, gpu: str, settings: Settings) -> Result:
    """Run ``script`` on ``gpu``, a machine of the catalogue, ``"cuda"`` or ``"dry:H100"``.

    Raises :class:`ScriptError` where it cannot be run there.
    """
    request = Request(script, gpu, settings.steps, settings.seconds, Path())
    answer = _answered(request, quiet=settings.quiet)
    if answer.wants_values and answer.work <= settings.seconds:
        said = answer.sentence if answer.ending == endings.UNKNOWN else _MADE_UP
        why = said.partition(", which")[0]
        _say(f"{script.name} runs again, with real values on the CPU: {why}")
        request = replace(request, again=why)
        answer = _answered(request, quiet=settings.quiet)
    _check(answer, request)
    simulated = gpu != endings.MEASURED and not gpu.startswith(endings.DRY)
    if answer.ending != endings.OUT_OF_MEMORY or not simulated:
        return Result(answer, fits=answer.ending != endings.OUT_OF_MEMORY)
    _say(f"{script.name} ran out of memory on {answer.gpu}: again, with as much as it wants")
    larger = _answered(replace(request, unbounded=True), quiet=settings.quiet)
    _check(larger, request)
    return Result(answer, fits=False, larger=larger)


def _say(sentence: str) -> None:
    print(f"gpumem: {sentence}", file=sys.stderr, flush=True)


def _answered(request: Request, *, quiet: bool) -> Answer:
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        request = replace(request, answer=Path(folder) / "answer.json")
        path = Path(folder) / "request.json"
        request.to_file(path)
        command = [sys.executable, "-c", _PROGRAM, str(_PACKAGE), str(path)]
        environment = {**os.environ, **_variables(request.gpu)}
        output = STDERR if quiet else None
        with subprocess.Popen(command, stdout=output, env=environment) as process:
            code = _waited(process, request)
        if not request.answer.is_file():
            raise ScriptError(_without_answer(request, code))
        answer = Answer.from_file(request.answer)
    if answer.ending == endings.INTERRUPTED:
        raise KeyboardInterrupt
    return answer


def _variables(gpu: str) -> Mapping[str, str]:
    """Return the variables that select the process's device; raises :class:`ScriptError`."""
    if not gpu.startswith(endings.DRY):
        return {}
    from pytest_gpumem.dry.load import environment
    from pytest_gpumem.dry.torch_build import DryError

    try:
        return environment(gpu.removeprefix(endings.DRY))
    except DryError as error:
        raise ScriptError(f"--device dry: {error}") from None


def _check(answer: Answer, request: Request) -> None:
    """Raise :class:`ScriptError` where a run has no result for the script."""
    name = request.script.name
    if answer.ending == endings.UNKNOWN and not request.again:
        raise ScriptError(
            f"{name}: {answer.sentence}; and computing values on the CPU takes at least "
            f"{answer.work:,.0f} s, more than --seconds {request.seconds:g}"
        )
    if answer.ending in (endings.REFUSED, endings.NOT_RUN, endings.UNKNOWN):
        raise ScriptError(f"{name}: {answer.sentence}")
    ran = answer.ending in (endings.STOPPED, endings.ENDED, endings.TIME)
    if ran and not any(one.peak_allocated for one in answer.measurements):
        raise ScriptError(
            f"{name} allocated nothing on the {answer.gpu} in {answer.seconds:.0f} s: it may "
            "choose another device by its own options, or need more --seconds to come to it"
        )


def _waited(process: subprocess.Popen[bytes], request: Request) -> int | None:
    """Return the exit code, ``None`` where the process had to be killed."""
    try:
        return process.wait(request.seconds + GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    except KeyboardInterrupt:  # which the process has received, too
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(5)
        process.kill()
        raise


def _without_answer(request: Request, code: int | None) -> str:
    name = request.script.name
    if code is None:
        return (
            f"{name} did not end {GRACE:.0f} s after it was stopped, and was killed: does it "
            "catch what ends a process?"
        )
    if code < 0:
        return f"{name} was killed by signal {-code}, so nothing is known of its memory"
    return f"{name} ended its process with code {code}, so nothing is known of its memory"
