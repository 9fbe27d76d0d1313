"""Memory by source line: what each line of a function allocated and freed."""

from __future__ import annotations

import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    """A line of a function, all its executions together; sizes in bytes."""

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
    """The bytes that the process held of the device when the line was left for the last time: by
    NVML, with the CUDA context; on a simulated device, which has none, what the allocator has
    reserved. ``None`` where NVML cannot read it."""
    added: tuple[Group, ...] = ()
    removed: tuple[Group, ...] = ()


@dataclass
class _Execution:
    """A line from when it was reached to when the next one was; positions in the history."""

    code: CodeType
    number: int
    begin: int
    end: int = 0
    process: int | None = None
    """Bytes of the device that the process held then."""


@dataclass
class _Follower:
    """A tracer of the lines of some functions, by ``sys.settrace``."""

    codes: frozenset[CodeType]
    position: Callable[[], int]
    process: Callable[[], int | None]
    executions: list[_Execution] = field(default_factory=list)
    _open: dict[FrameType, _Execution] = field(default_factory=dict)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Trace the code that runs inside."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code in self.codes else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            now = self.position()
            if (execution := self._open.pop(frame, None)) is not None:
                execution.end, execution.process = now, self.process()
            if event == "line":
                execution = _Execution(frame.f_code, frame.f_lineno, now)
                self._open[frame] = execution
                self.executions.append(execution)
        return self._line


def lines_of(
    target: Callable[[], Any], functions: Iterable[Callable[..., Any]], gpu: str = "A100-40GB"
) -> list[Line]:
    """Run ``target`` on a simulated ``gpu`` and return the memory of each line of ``functions``.

    ``gpu="cuda"`` is the current CUDA device. Lines are in the order in which they were reached
    first. Calls made by a line count to it.
    """
    codes = frozenset(function.__code__ for function in functions)
    return on_device(gpu, "", lambda device: _measured(target, codes, device))


def _measured(target: Callable[[], Any], codes: frozenset[CodeType], device: Device) -> list[Line]:
    if recorder := device.recorder:
        own = device.index
        return _followed(target, codes, recorder, own, lambda: torch.cuda.memory_reserved(own))
    torch.cuda.init()
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)

    def process() -> int | None:
        reading = read_device(index if uuid is None else str(uuid))
        return None if isinstance(reading, NvmlAbsent) else reading.process_used

    history = RecordedHistory()
    with history.during("all"):
        return _followed(target, codes, history, index, process)


def _followed(
    target: Callable[[], Any],
    codes: frozenset[CodeType],
    recorder: Recorder,
    device: int,
    process: Callable[[], int | None],
) -> list[Line]:
    follower = _Follower(codes, lambda: position_on(device, recorder.positions()), process)
    account = PeakRecorder(recorder, "")
    tracker = PhaseTracker(CudaStatistics(), account.positions)
    account.begin((), None)
    begin = position_on(device, recorder.positions())
    with AutomaticPhases(tracker, account.observer).watching(), follower.following():
        kept = target()
    account.end()
    history = account.history(device, tracker)
    del kept
    for execution in follower.executions:
        execution.begin -= begin
        execution.end -= begin
    return _lines(history, follower.executions)


def _lines(history: History, executions: Sequence[_Execution]) -> list[Line]:
    allocated = history.allocated()
    found: dict[tuple[CodeType, int], list[_Execution]] = defaultdict(list)
    for execution in executions:
        found[execution.code, execution.number].append(execution)

    def groups(
        times: Sequence[_Execution], belongs: Callable[[_Execution, BlockLifetime], bool]
    ) -> tuple[Group, ...]:
        lives = history.lifetimes
        return _groups(history, (life for at in times for life in lives if belongs(at, life)))

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
        for (code, number), times in found.items()
    ]


def _groups(history: History, lives: Iterable[BlockLifetime]) -> tuple[Group, ...]:
    groups: dict[tuple[Any, ...], list[BlockLifetime]] = defaultdict(list)
    for life in lives:
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


_KINDS = {
    PARAMETERS: "Parameter",
    GRADIENTS: "gradient",
    OPTIMIZER_STATE: "optimizer state",
    WORKSPACE: "workspace",
}
