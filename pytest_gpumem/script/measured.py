"""The run of a script on a device, in the script's process."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pytest_gpumem.attribution.out_of_memory import OutOfMemory
from pytest_gpumem.device import DeviceError, ValueLevel
from pytest_gpumem.device.device import ComputingDevice, Device
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.measurement.automatic_phases import BACKWARD, FORWARD, STEP
from pytest_gpumem.measurement.composition import PeakRecorder
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.phases import Phase, PhaseTracker
from pytest_gpumem.measurement.recorded import RecordedHistory
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.prediction.function import device_here
from pytest_gpumem.prediction.process import UNBOUNDED
from pytest_gpumem.script import process as endings
from pytest_gpumem.script.entry import ScriptError, chain, show_traceback
from pytest_gpumem.script.process import ITERATION, LOAD, Request, ScriptResult
from pytest_gpumem.script.stopping import Alarm, Steps, StopError
from pytest_gpumem.simulated.common.callsite import callers_line, user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.gpu.catalogue import Machine, find_machine
from pytest_gpumem.simulated.surface.checkpoints import gives_no_values, restore_unknown
from pytest_gpumem.values.errors import SimulationError, UnknownValueError
from pytest_gpumem.values.measurement import CALL, SETUP, Measurement, PhaseRecord

STACKS = "all"
"""The recorded stacks of a real device's allocations: Python's and C++'s."""


@dataclass(frozen=True)
class ScriptRun:
    """The result of one run."""

    error: BaseException | None
    """The exception that ended the script; ``None`` if it ran to its last line."""
    steps: int
    time_is_over: bool
    seconds: float
    measurements: tuple[Measurement, ...]
    """The measurement of the requested device, then of others that the script used."""
    out_of_memory: OutOfMemory | None


def run_measured(request: Request, device: Device, resources: ExitStack) -> ScriptRun:
    """Run the script of ``request`` on ``device``, for at most the requested steps and seconds.

    The device is active until ``resources`` are closed: exit handlers of the script may need it.
    """
    script = request.script
    resources.enter_context(device.active())
    resources.enter_context(device.measuring(script.name))
    statistics = CudaStatistics(device.workspaces)
    resources.enter_context(statistics.own_peaks_shown())
    recorder = device.recorder
    if recorder is None:
        recorder = RecordedHistory()
        resources.enter_context(recorder.during(STACKS))
    account = PeakRecorder(recorder, os.getcwd())  # noqa: PTH109 - a string
    meter = Meter(statistics, FixtureRecords(), account, tracker=Iterations)
    tracker = meter.tracker
    assert isinstance(tracker, Iterations)
    device.begin_test(script.name, (), lambda *_: None)
    counter = Steps(request.steps, lambda more: tracker.iterated(more=more))
    alarm = Alarm(request.seconds)
    if isinstance(device, ComputingDevice):
        device.work.check = alarm.check
    kept: AbstractContextManager[None] = nullcontext()
    if isinstance(device, SimulatedDevice) and not device.has_values:
        kept = checkpoints_protected(device.note)
    begin = time.monotonic()
    error: BaseException | None = None
    with meter.running(()):
        tracker.load()
        try:
            with kept, meter.watching(), counter.counted(), alarm.set():
                device.restart_collector()
                with children_ended(resources.close):
                    script.run()
            device.end_body()
        except BaseException as raised:
            error = raised
        tracker.iterated(more=False)
    taken = time.monotonic() - begin
    found = meter.measurements((), (), device=device.index, passed=False)
    measured, notes = {}, list[str]()
    if request.again and request.computed is ValueLevel.ALL:
        notes.append(f"run again with real values on the CPU: {request.again}")
    for index, one in found.items():
        phases = {phase.name: phase for phase in _shown(one.phases, counter.count)}
        one = device.complete(replace(one, phases=phases))
        measured[index] = replace(one, notes=(*notes, *one.notes))
    own = measured.pop(device.index)
    others = (one for one in measured.values() if one.peak_allocated > 0)
    post_mortem = None
    if is_out_of_memory(error):
        post_mortem = account.out_of_memory(device.index, tracker, device.total_memory)
    return ScriptRun(error, counter.count, alarm.rang, taken, (own, *others), post_mortem)


@contextmanager
def children_ended(close: Callable[[], None]) -> Iterator[None]:
    """End the processes that are forked inside as without this package: without a measurement.

    ``close`` is the handler for the end of this process alone.
    """
    own = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = _exit_code(error)
            _print_text(error)
        elif isinstance(error, StopError):
            code = 0
        else:
            show_traceback(error)
    else:
        code = 0
    if os.getpid() != own:
        atexit.unregister(close)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    """Return the exit code of a process, as a shell sees it."""
    code = 0 if error.code is None else error.code
    return code & 0xFF if isinstance(code, int) else 1


def _print_text(error: SystemExit) -> None:
    """Print the text of ``sys.exit("text")`` as Python does."""
    if not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` is, or was caused by, an allocation that found no memory."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in chain(error))


_MARK = restore_unknown.__name__.encode()
"""A name in the pickle of a tensor without values, which torch.save does not compress, and in the
metadata at the beginning of a safetensors file."""

_METADATA = {"pytest_gpumem": _MARK.decode()}

_LOOKED_AT = 1 << 24
"""The number of bytes to read from the beginning of a file, where its pickle is."""


@contextmanager
def checkpoints_protected(note: Callable[[str], None]) -> Iterator[None]:
    """Keep ``torch.save`` and safetensors from overwriting files with values by mere shapes.

    The same holds for a distributed checkpoint in a folder that contains one with values. ``note``
    is called with a sentence on each file that was kept.
    """
    elsewhere: list[tempfile.TemporaryDirectory[str]] = []

    def note_kept(writer: str, path: Path) -> None:
        note(
            f"{writer} has left {path.name} as it was: a simulated GPU has shapes to write, and no "
            "values"
        )

    def prepare_local_plan(prepare: Callable[..., Any], writer: FileSystemWriter, plan: Any) -> Any:
        folder = Path(writer.path)
        if any(not _has_no_values(part) for part in folder.glob("*.distcp")):
            elsewhere.append(tempfile.TemporaryDirectory())
            writer.path = Path(elsewhere[-1].name)
            note_kept(f"a distributed checkpoint at {user_line()}", folder)
        return prepare(writer, plan)

    def save(write: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, (str, os.PathLike)) else None
        if path is None or not path.is_file() or _has_no_values(path):
            write(obj, f, *args, **kwargs)
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            write(obj, new, *args, **kwargs)
            if not _has_no_values(new):
                new.replace(path)
                return
        note_kept(f"torch.save at {user_line()}", path)

    def serialize_file(
        write: Callable[..., None], tensors: Any, filename: Any, metadata: Any = None
    ) -> None:
        if not gives_no_values():
            write(tensors, filename, metadata=metadata)
            return
        path = Path(filename)
        if not path.is_file() or _has_no_values(path):
            write(tensors, filename, metadata={**(metadata or {}), **_METADATA})
            return
        note_kept(f"safetensors at {callers_line()}", path)

    patches = Patches()
    if find_spec("safetensors") is not None:
        patches.wrap(importlib.import_module("safetensors.torch"), "serialize_file", serialize_file)
    for place in (torch, torch.serialization):
        patches.wrap(place, "save", save)
    patches.wrap(FileSystemWriter, "prepare_local_plan", prepare_local_plan)
    with patches.applied():
        try:
            yield
        finally:
            for folder in elsewhere:
                folder.cleanup()


def _has_no_values(path: Path) -> bool:
    with path.open("rb") as file:
        return _MARK in file.read(_LOOKED_AT)


PARTS = (FORWARD, BACKWARD, STEP)


class Iterations(PhaseTracker):
    """The phases of a script: ``load``, then ``iteration_1`` with ``forward_1`` and others inside.

    With gradient accumulation, the forwards of one iteration are one phase.
    """

    _count = 0
    _present: Phase | None = None
    _is_over = False

    def load(self) -> None:
        """Begin the phase before the first iteration."""
        self._present = super().enter(LOAD)

    def enter(self, name: str) -> Phase | None:
        """Begin the phase ``name``, numbered by iteration if it is an automatic phase."""
        if name not in PARTS:
            return super().enter(name)
        if self._is_over:  # code of exit handlers belongs to no iteration
            return None
        if not self._count:
            self.iterated(more=True)
        return super().enter(f"{name}_{self._count}")

    def iterated(self, *, more: bool) -> None:
        """End the current iteration, and begin another one if there are ``more``."""
        if self._present is not None:
            self.leave(self._present)
        self._present = None
        self._is_over = not more
        if more:
            self._count += 1
            self._present = super().enter(f"{ITERATION}_{self._count}")


def _shown(found: Mapping[str, PhaseRecord], steps: int) -> Iterator[PhaseRecord]:
    """Yield the phases of ``found`` to show, in order.

    Without optimizer steps, as in inference, there are no iterations but one ``forward``.
    """
    for name, phase in found.items():
        if name in (SETUP, CALL):
            continue
        part, _, number = name.rpartition("_")
        parent = None if phase.parent == CALL else phase.parent
        if not steps and part == ITERATION:
            continue
        if not steps and part in PARTS and number == "1":
            yield replace(phase, name=part, parent=None)
        else:
            yield replace(phase, parent=parent)


def main(path: str) -> None:
    """Run the request in the file ``path``, and write the result."""
    request = Request.from_file(Path(path))
    sys.path.pop(0)  # this package's folder; in a plain run it would be the script's folder
    resources = ExitStack()
    atexit.register(resources.close)  # runs after the exit handlers of the script
    if request.gpu == endings.MEASURED and not torch.cuda.is_available():
        why = "--gpu cuda: torch sees no CUDA device; name a model to be simulated"
        ScriptResult(endings.NOT_RUN, why).to_file(request.answer)
        return
    device: Device
    if request.gpu == endings.MEASURED or request.gpu.startswith(endings.DRY):
        try:
            device = device_here(request.computed)
        except DeviceError as error:
            ScriptResult(endings.NOT_RUN, str(error)).to_file(request.answer)
            return
    else:
        machine = find_machine(request.gpu)
        if request.unbounded:
            machine = Machine(replace(machine.model, total_memory=UNBOUNDED), machine.count)
        device = SimulatedDevice(machine, real_values=request.computed is ValueLevel.ALL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run = run_measured(request, device, resources)
    answer = _answer(run, device)
    sys.stdout.flush()
    if answer.next_values(request.seconds) is not None:
        pass  # the error depends on missing values, and the script runs again
    elif answer.ending == endings.RAISED:
        show_traceback(run.error or AssertionError())
    elif answer.ending == endings.EXITED and isinstance(run.error, SystemExit):
        _print_text(run.error)
    answer.to_file(request.answer)


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
    measurements = run.measurements
    if computing is not None and computing.decided_by is not None:
        read = next((one for one in chain(run.error) if isinstance(one, UnknownValueError)), None)
        if type(read) is not UnknownValueError:  # raised later than it was read, or not at all
            measurements = ()
    *post_mortem, remedy = run.out_of_memory.lines() if run.out_of_memory else [""]
    return ScriptResult(
        ending,
        sentence,
        run.steps,
        round(run.seconds, 2),
        device.environment.gpu,
        device.total_memory,
        torch=torch.__version__.partition("+")[0],
        measurements=measurements,
        out_of_memory=run.out_of_memory.to_dict() if run.out_of_memory else None,
        post_mortem=tuple(post_mortem),
        remedy=remedy,
        used_placeholder=used,
        again=again or "",
        further=computing.next_level if computing is not None and again else None,
        work=computing.work.seconds if computing is not None else 0.0,
    )


def _ending(run: ScriptRun) -> tuple[str, str]:
    """Return the kind of a run's end, and the sentence on it, which may be empty."""
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
        code = _exit_code(error)
        return (endings.EXITED, str(code)) if code else (endings.ENDED, "")
    if isinstance(error, ScriptError):
        return endings.NOT_RUN, str(error)
    if isinstance(error, KeyboardInterrupt):
        return endings.INTERRUPTED, ""
    text = str(error).strip().partition("\n")[0]
    return endings.RAISED, f"{type(error).__name__}: {text}" if text else type(error).__name__
