"""Memory by source line: what each line of a function allocated and freed."""

from __future__ import annotations

import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from pytest_gpumem.attribution.composition import category_of
from pytest_gpumem.attribution.history import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    WORKSPACE,
    BlockLifetime,
    History,
)
from pytest_gpumem.device.device import Device
from pytest_gpumem.measurement.automatic_phases import AutomaticPhases
from pytest_gpumem.measurement.composition import PeakRecorder
from pytest_gpumem.measurement.nvml import NvmlAbsent, read_device
from pytest_gpumem.measurement.phases import PhaseTracker, position_on
from pytest_gpumem.measurement.recorded import RecordedHistory, Recorder
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.prediction.function import on_device
from pytest_gpumem.values.serialization import Plain


@dataclass(frozen=True)
class Group(Plain):
    """Equal tensors; ``bytes`` are those of all ``count``."""

    count: int
    shape: tuple[int, ...] | None
    dtype: str
    kind: str
    """``Parameter``, ``gradient``, ``optimizer state``, ``workspace`` or ``Tensor``."""
    bytes: int


@dataclass
class Line(Plain):
    """A line of a function, with all its executions; sizes in bytes."""

    path: str
    number: int
    function: str
    source: str
    times: int = 0
    before: int = 0
    """Bytes allocated when the line was reached for the first time."""
    after: int = 0
    """Bytes allocated when it was left for the last time."""
    peak: int = 0
    """The most bytes allocated while it ran."""
    process: int | None = None
    """The bytes of the device that the process held when the line was left for the last time: by
    NVML, with the CUDA context; on a simulated device the allocator's reserved bytes. ``None``
    if NVML cannot read it."""
    added: tuple[Group, ...] = ()
    removed: tuple[Group, ...] = ()


@dataclass
class _Execution:
    """One execution of a line, until the next line is reached; positions in the history."""

    code: CodeType
    number: int
    begin: int
    end: int = 0
    process: int | None = None
    """Bytes of the device that the process held then."""


@contextmanager
def _tracing_lines(
    codes: frozenset[CodeType], position: Callable[[], int], process: Callable[[], int | None]
) -> Iterator[list[_Execution]]:
    """Trace the lines of some functions inside, by ``sys.settrace``."""
    executions: list[_Execution] = []
    present: dict[FrameType, _Execution] = {}

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            now = position()
            if (execution := present.pop(frame, None)) is not None:
                execution.end, execution.process = now, process()
            if event == "line":
                present[frame] = execution = _Execution(frame.f_code, frame.f_lineno, now)
                executions.append(execution)
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line if frame.f_code in codes else None)
    try:
        yield executions
    finally:
        sys.settrace(before)


def lines_of(
    target: Callable[[], Any], functions: Iterable[Callable[..., Any]], gpu: str = "A100-40GB"
) -> list[Line]:
    """Run ``target`` on a simulated ``gpu`` and return the memory of each line of ``functions``.

    ``gpu="cuda"`` is the current CUDA device. Lines are in the order of their first execution. A
    line's memory includes that of the calls it makes.
    """
    codes = frozenset(function.__code__ for function in functions)
    return on_device(gpu, "", lambda device: _measured(target, codes, device))


def _measured(target: Callable[[], Any], codes: frozenset[CodeType], device: Device) -> list[Line]:
    if recorder := device.recorder:
        own = device.index
        return _run_traced(target, codes, recorder, own, lambda: torch.cuda.memory_reserved(own))
    torch.cuda.init()
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)

    def process() -> int | None:
        reading = read_device(index if uuid is None else str(uuid))
        return None if isinstance(reading, NvmlAbsent) else reading.process_used

    history = RecordedHistory()
    with history.during("all"):
        return _run_traced(target, codes, history, index, process)


def _run_traced(
    target: Callable[[], Any],
    codes: frozenset[CodeType],
    recorder: Recorder,
    device: int,
    process: Callable[[], int | None],
) -> list[Line]:
    account = PeakRecorder(recorder, "")
    tracker = PhaseTracker(CudaStatistics(), account.positions)
    account.begin((), None)
    begin = position_on(device, recorder.positions())
    following = _tracing_lines(
        codes, lambda: position_on(device, recorder.positions()) - begin, process
    )
    with AutomaticPhases(tracker, account.observer).watching(), following as executions:
        kept = target()
    account.end()
    history = account.history(device, tracker)
    del kept
    return _lines(history, executions)


def _lines(history: History, executions: Sequence[_Execution]) -> list[Line]:
    allocated = history.allocated()
    by_line: dict[tuple[CodeType, int], list[_Execution]] = defaultdict(list)
    for execution in executions:
        by_line[execution.code, execution.number].append(execution)

    def groups(
        times: Sequence[_Execution], belongs: Callable[[_Execution, BlockLifetime], bool]
    ) -> tuple[Group, ...]:
        groups: dict[tuple[Any, ...], list[BlockLifetime]] = defaultdict(list)
        for life in (life for at in times for life in history.lifetimes if belongs(at, life)):
            origin = life.origin
            shape = None if origin is None or origin.shape is None else tuple(origin.shape)
            dtype = "" if origin is None or origin.dtype is None else str(origin.dtype)
            kind = _KINDS.get(category_of(history, life), "Tensor")
            groups[shape, dtype.removeprefix("torch."), kind].append(life)
        found = [
            Group(len(same), shape, dtype, kind, sum(life.nbytes for life in same))
            for (shape, dtype, kind), same in groups.items()
        ]
        return tuple(sorted(found, key=lambda group: (-group.bytes, str(group))))

    return [
        Line(
            path=code.co_filename,
            number=number,
            function=code.co_name,
            source=linecache.getline(code.co_filename, number).strip(),
            times=len(times),
            before=allocated[times[0].begin],
            after=allocated[times[-1].end],
            peak=max(max(allocated[one.begin : one.end + 1]) for one in times),
            process=times[-1].process,
            added=groups(times, lambda at, one: at.begin <= one.made_at < at.end <= one.freed_at),
            removed=groups(times, lambda at, one: one.made_at < at.begin <= one.freed_at < at.end),
        )
        for (code, number), times in by_line.items()
    ]


_KINDS = {
    PARAMETERS: "Parameter",
    GRADIENTS: "gradient",
    OPTIMIZER_STATE: "optimizer state",
    WORKSPACE: "workspace",
}
