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

from pytest_gpumem.device import Computed
from pytest_gpumem.script import request as endings
from pytest_gpumem.script.entry import Script, ScriptError
from pytest_gpumem.script.request import Answer, Request

_MADE_UP = "it failed after it read a value that is not computed"

GRACE = 120.0
"""Seconds that a script may take to end after it has been stopped, start and answer included."""

STDERR = 2

_VALUES = {Computed.SMALL: "values of small tensors", Computed.ALL: "real values"}
"""The values that a further run computes."""

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
    def reported_answer(self) -> Answer:
        """The answer whose numbers are the script's."""
        return self.larger or self.answer


def run_on(script: Script, gpu: str, settings: Settings) -> Result:
    """Return the results of ``script`` on ``gpu``: a machine, ``"cuda"`` or ``"dry:H100"``."""
    request = Request(script, gpu, settings.steps, settings.seconds, Path())
    answer = _answered(request, quiet=settings.quiet)
    while (computed := answer.next_values(settings.seconds)) is not None:
        sentence = answer.sentence if answer.ending == endings.UNKNOWN else _MADE_UP
        why = sentence.partition(", which")[0]
        _print(f"{script.name} runs again, with {_VALUES[computed]} on the CPU: {why}")
        request = replace(request, computed=computed, again=why)
        answer = _answered(request, quiet=settings.quiet)
    _check(answer, request)
    fits = answer.ending != endings.OUT_OF_MEMORY
    if fits or gpu == endings.MEASURED or gpu.startswith(endings.DRY):
        return Result(answer, fits)
    _print(f"{script.name} ran out of memory on {answer.gpu}: again, with as much as it wants")
    larger = _answered(replace(request, unbounded=True), quiet=settings.quiet)
    _check(larger, request)
    return Result(answer, fits, larger)


def _print(sentence: str) -> None:
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
            ending = _waited(process, request)
        if not request.answer.is_file():
            raise ScriptError(f"{request.script.name} {ending}")
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
    if answer.ending == endings.UNKNOWN and answer.further is not None:
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


def _waited(process: subprocess.Popen[bytes], request: Request) -> str:
    """Wait for the process; return the predicate of a sentence on its end without an answer."""
    try:
        code = process.wait(request.seconds + GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return (
            f"did not end {GRACE:.0f} s after it was stopped, and was killed: does it catch what "
            "ends a process?"
        )
    except KeyboardInterrupt:  # which the process has received, too
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(5)
        process.kill()
        raise
    how = f"was killed by signal {-code}" if code < 0 else f"ended its process with code {code}"
    return f"{how}, so nothing is known of its memory"
