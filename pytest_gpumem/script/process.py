"""The process in which a script runs: its request, its result, and further runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.dry.load import environment_of_option
from pytest_gpumem.script.entry import Script, ScriptError
from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.serialization import Plain

MEASURED = "cuda"
"""The name of the real CUDA device, in place of a model to simulate."""
DRY = "dry:"
"""The prefix of a machine's name that selects the dry device."""

STOPPED = "stopped"
"""The ending after the requested number of steps."""
TIME = "time"
ENDED = "ended"
"""The ending of a script that ran to its last line."""
EXITED = "exited"
"""The ending with an exit code other than 0."""
OUT_OF_MEMORY = "out of memory"
RAISED = "raised"
UNKNOWN = "unknown value"
"""The ending of a script that read a value that a simulated device does not have."""
REFUSED = "refused"
"""The ending of a script that used something a simulated device cannot do."""
NOT_RUN = "not run"
INTERRUPTED = "interrupted"


LOAD = "load"
"""The phase before a script's first forward."""
ITERATION = "iteration"
"""The phase of an iteration; it is numbered, as the phases inside are: ``iteration_1``."""


def iteration_of(name: str) -> int | None:
    """Return the iteration that the phase ``name`` belongs to, ``None`` for none."""
    part, _, number = name.rpartition("_")
    return int(number) if part and number.isdecimal() else None


@dataclass(frozen=True)
class Request(Plain):
    """The request for one run; ``gpu`` is a machine of the catalogue or :data:`MEASURED`."""

    script: Script
    gpu: str
    steps: int
    seconds: float
    answer: Path
    unbounded: bool = False
    computed: ValueLevel = ValueLevel.AT_FIRST
    """The level of values that the CPU computes."""
    again: str = ""
    """The reason why it computes more values than the first run; empty for a first run."""


@dataclass(frozen=True)
class ScriptResult(Plain):
    """The result of one run; sizes in bytes."""

    ending: str
    sentence: str = ""
    """The message of its exception, or the reason why it could not run."""
    steps: int = 0
    seconds: float = 0.0
    gpu: str = ""
    total_memory: int = 0
    fits: bool = True
    """Whether memory sufficed; if not, its numbers may be those of a run with unlimited memory."""
    torch: str = ""
    measurements: tuple[Measurement, ...] = ()
    """The measurements of the requested device first, then of others that were used.

    After a read of an unknown value they are those of the part before it, or none.
    """
    out_of_memory: Mapping[str, Any] | None = None
    """The reason why the last failed allocation failed."""
    post_mortem: tuple[str, ...] = ()
    remedy: str = ""
    """The last line of the post-mortem: an allocator setting that helps, or that none does."""
    used_placeholder: bool = False
    """Whether the run used a value that was not computed."""
    again: str = ""
    """The reason why the run depends on a value that was not computed; empty if it does not."""
    further: ValueLevel | None = None
    """The level of values for another run, which may get further; ``None`` for none."""
    work: float = 0.0
    """The least seconds that computing all values takes."""

    def next_values(self, seconds: float) -> ValueLevel | None:
        """Return the level of another run that takes at most ``seconds``; ``None`` for none."""
        takes_too_long = self.further is ValueLevel.ALL and self.work > seconds
        return None if takes_too_long else self.further

    @property
    def reason(self) -> str:
        """The read that the run depends on, as a clause."""
        return self.again.partition(", which")[0]

    def enough_for(self, steps: int) -> int:
        """Return seconds in which all values of ``steps`` steps are likely to be computed.

        The work is that of the steps up to the unknown value, and a lower limit.
        """
        likely = 2 * self.work * max(steps / max(self.steps, 1), 1)
        digits: int = 10 ** max(math.floor(math.log10(max(likely, 1))) - 1, 0)
        return math.ceil(likely / digits) * digits


GRACE = 120.0
"""Seconds for the start of a script, its end after it was stopped, and its result."""

STDERR = 2

_VALUES = {ValueLevel.SMALL: "values of small tensors", ValueLevel.ALL: "real values"}
"""The values that a further run computes."""

_PACKAGE = Path(__file__).resolve().parents[2]
_PROGRAM = """\
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[0] = sys.argv[1]
from pytest_gpumem.script.measured import main
main(sys.argv[2])
"""
"""The child's program; until the script begins, Ctrl-C ends the process silently."""


def run_on(script: Script, gpu: str, *, steps: int, seconds: float, quiet: bool) -> ScriptResult:
    """Return the result of ``script`` on ``gpu``: a machine, ``"cuda"`` or ``"dry:H100"``.

    If ``quiet``, the script's output goes to stderr.
    """
    request, answer = _run_with_values(Request(script, gpu, steps, seconds, Path()), quiet=quiet)
    if answer.ending != OUT_OF_MEMORY:
        return answer
    answer = replace(answer, fits=False)
    if gpu == MEASURED or gpu.startswith(DRY):
        return answer
    _print(
        f"{script.name} ran out of memory on {answer.gpu}. Running again without a memory limit, "
        "to see what it needs"
    )
    try:
        _, larger = _run_with_values(replace(request, unbounded=True), quiet=quiet)
    except ScriptError as error:  # what is known is reported
        _print(str(error))
        return answer
    peak, remedy = larger.measurements[0].peak_allocated, answer.remedy
    if peak > answer.total_memory:  # the replay knows only the requests up to the failed one
        remedy = f"  no allocator setting would help: the peak is {format_size(peak)}"
    return replace(
        larger,
        fits=False,
        total_memory=answer.total_memory,
        out_of_memory=answer.out_of_memory,
        post_mortem=answer.post_mortem,
        remedy=remedy,
    )


def _run_with_values(request: Request, *, quiet: bool) -> tuple[Request, ScriptResult]:
    """Return the last run of ``request``, which has as many values as needed and affordable."""
    name, seconds = request.script.name, request.seconds
    answer = _run_process(request, quiet=quiet)
    while (computed := answer.next_values(seconds)) is not None:
        why = answer.reason
        _print(f"{name} runs again, with {_VALUES[computed]} on the CPU: {why}")
        request = replace(request, computed=computed, again=why)
        answer = _run_process(request, quiet=quiet)
    if answer.ending == UNKNOWN and answer.further is not None:
        sentence = (
            f"{answer.sentence}; and computing values on the CPU takes at least "
            f"{answer.work:,.0f} s, more than --seconds {seconds:g}: give --seconds "
            f"{answer.enough_for(request.steps)} or more"
        )
        answer = replace(answer, sentence=sentence)
    _check(answer, name)
    return request, answer


def _print(sentence: str) -> None:
    print(f"gpumem: {sentence}", file=sys.stderr, flush=True)


def _run_process(request: Request, *, quiet: bool) -> ScriptResult:
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        request = replace(request, answer=Path(folder) / "answer.json")
        path = Path(folder) / "request.json"
        request.to_file(path)
        command = [sys.executable, "-c", _PROGRAM, str(_PACKAGE), str(path)]
        environment = dict(os.environ)
        if request.gpu.startswith(DRY):
            environment |= environment_of_option(request.gpu.removeprefix(DRY))
        output = STDERR if quiet else None
        with subprocess.Popen(command, stdout=output, env=environment) as process:
            ending = _waited(process, request)
        if not request.answer.is_file():
            raise ScriptError(f"{request.script.name} {ending}")
        answer = ScriptResult.from_file(request.answer)
    if answer.ending == INTERRUPTED:
        raise KeyboardInterrupt
    return answer


def _check(answer: ScriptResult, name: str) -> None:
    """Raise :class:`ScriptError` if a run of the script ``name`` has no usable result."""
    used = any(one.peak_allocated for one in answer.measurements)
    if answer.ending in (REFUSED, NOT_RUN) or (answer.ending == UNKNOWN and not used):
        raise ScriptError(f"{name}: {answer.sentence}")
    if answer.ending in (STOPPED, ENDED, TIME) and not used:
        raise ScriptError(
            f"{name} allocated nothing on the {answer.gpu} in {answer.seconds:.0f} s: it may "
            "choose another device by its own options, or need more --seconds to come to it"
        )


def _waited(process: subprocess.Popen[bytes], request: Request) -> str:
    """Wait for the process; return the predicate of a sentence on its end without a result."""
    try:
        code = process.wait(request.seconds + GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return (
            f"did not end {GRACE:.0f} s after it was stopped, and was killed: it may catch "
            "SystemExit or KeyboardInterrupt"
        )
    except KeyboardInterrupt:  # the process has received the signal, too
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(5)
        process.kill()
        raise
    how = f"was killed by signal {-code}" if code < 0 else f"ended its process with code {code}"
    return f"{how}, so nothing is known of its memory"
