"""The process of one run of a script."""

from __future__ import annotations

import atexit
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.device import ComputingDevice, Device
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.prediction.child import UNBOUNDED
from pytest_gpumem.prediction.function import device_here
from pytest_gpumem.script import process as endings
from pytest_gpumem.script.entry import ScriptError, chain, show_traceback
from pytest_gpumem.script.measured import ScriptRun, is_out_of_memory, run_measured
from pytest_gpumem.script.process import Request, ScriptResult
from pytest_gpumem.script.stopping import StopError
from pytest_gpumem.simulated.gpu.catalogue import Machine, find_machine
from pytest_gpumem.values.errors import SimulationError, UnknownValueError


def main(path: str) -> None:
    """Run the request in the file ``path``, and write the answer."""
    request = Request.from_file(Path(path))
    sys.path.pop(0)  # where this package was found; Python puts the script's folder there
    resources = ExitStack()
    atexit.register(resources.close)  # behind whatever the script registers
    if request.gpu == endings.MEASURED and not torch.cuda.is_available():
        why = "--gpu cuda: torch sees no CUDA device; name a model to be simulated"
        ScriptResult(endings.NOT_RUN, why).to_file(request.answer)
        return
    device = _device(request)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    note = ""
    if request.again and request.computed is ValueLevel.ALL:
        note = f"run again with real values on the CPU: {request.again}"
    run = run_measured(
        request.script, device, resources, steps=request.steps, seconds=request.seconds, note=note
    )
    answer = _answer(run, device)
    sys.stdout.flush()
    if answer.next_values(request.seconds) is not None:
        pass  # it runs again: the error depends on values
    elif answer.ending == endings.RAISED:
        show_traceback(run.error or AssertionError())
    elif (
        answer.ending == endings.EXITED
        and isinstance(run.error, SystemExit)
        and not isinstance(run.error.code, int)
    ):
        print(run.error.code, file=sys.stderr)  # as Python does for sys.exit("why")
    answer.to_file(request.answer)


def _device(request: Request) -> Device:
    if request.gpu == endings.MEASURED or request.gpu.startswith(endings.DRY):
        return device_here(request.computed)
    machine = find_machine(request.gpu)
    if request.unbounded:
        machine = Machine(replace(machine.model, total_memory=UNBOUNDED), machine.count)
    return SimulatedDevice(machine, real_values=request.computed is ValueLevel.ALL)


def _answer(run: ScriptRun, device: Device) -> ScriptResult:
    ending, sentence = _ending(run)
    computing = device if isinstance(device, ComputingDevice) else None
    used = computing is not None and computing.next_level is not None and computing.used_placeholder
    again = None
    if computing is not None and ending != endings.INTERRUPTED:
        failed = used and ending in (endings.RAISED, endings.EXITED)
        is_unknown = ending == endings.UNKNOWN
        again = sentence if is_unknown else computing.reason_to_rerun(None, failed=failed)
        if computing.decided_by is not None:
            ending, sentence = endings.UNKNOWN, computing.decided_by
    found = run.out_of_memory
    return ScriptResult(
        ending,
        sentence,
        run.steps,
        round(run.seconds, 2),
        device.environment.gpu,
        device.total_memory,
        torch.__version__.partition("+")[0],
        run.measurements,
        found.to_dict() if found else None,
        tuple(found.lines()) if found else (),
        used_placeholder=used,
        again=again or "",
        further=computing.next_level if computing is not None and again else None,
        work=computing.work.seconds if computing is not None else 0.0,
    )


def _ending(run: ScriptRun) -> tuple[str, str]:
    """Return how a run ended, and the sentence on it, which may be empty."""
    error = run.error
    if error is None:
        return endings.ENDED, ""
    for one in chain(error):
        if isinstance(one, StopError):
            return (endings.TIME if run.time_is_over else endings.STOPPED), ""
        if isinstance(one, UnknownValueError):
            return endings.UNKNOWN, str(one)
        if isinstance(one, SimulationError):
            return endings.REFUSED, str(one)
    if is_out_of_memory(error):
        return endings.OUT_OF_MEMORY, ""
    if isinstance(error, SystemExit):
        given = 0 if error.code is None else error.code
        code = given & 0xFF if isinstance(given, int) else 1  # as a shell sees it
        return (endings.EXITED, str(code)) if code else (endings.ENDED, "")
    if isinstance(error, ScriptError):
        return endings.NOT_RUN, str(error)
    if isinstance(error, KeyboardInterrupt):
        return endings.INTERRUPTED, ""
    text = str(error).strip().partition("\n")[0]
    return endings.RAISED, f"{type(error).__name__}: {text}" if text else type(error).__name__
