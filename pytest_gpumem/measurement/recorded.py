"""The recorded history of real and simulated devices, in the form that ``attribution`` reads."""

from __future__ import annotations

import pickle
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.allocator.blocks import round_size
from pytest_gpumem.allocator.trace import FREE
from pytest_gpumem.attribution.frames import NODE, OPERATOR, library_of
from pytest_gpumem.attribution.history import SUPPLY, Event, Origin
from pytest_gpumem.jsonfile import replace_file
from pytest_gpumem.measurement.phases import position_on
from pytest_gpumem.simulated.common.callsite import shown_operator
from pytest_gpumem.simulated.gpu.device import parse_version
from pytest_gpumem.simulated.splits import Splits

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).resolve().parents[1])
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "rand", "arange", "scalar_tensor", "eye", "linspace"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "resize"),
)
"""Prefixes of factory operators, which also run inside other operators."""


Segments = Sequence[Mapping[str, Any]]
"""Segments in the form of ``torch.cuda.memory_snapshot()``."""


@dataclass(frozen=True, eq=False)
class RecordedOrigin:
    """The origin of a block, from the frames of its allocation."""

    frames: Sequence[dict[str, Any]]
    sequence: int = -1
    has_node: bool = True
    shape: None = None
    dtype: None = None

    @cached_property
    def source_line(self) -> tuple[str, int, str] | None:
        """File, line and function of the innermost Python frame outside torch and the plugin."""
        for frame in self.frames:
            filename = frame["filename"]
            if filename.endswith(".py") and not filename.startswith((_TORCH, _OWN)):
                return filename, frame["line"], frame["name"]
        return None

    @cached_property
    def library(self) -> str | None:
        """The library whose workspace request appears in C++ frames."""
        return library_of(self._native)

    @cached_property
    def node(self) -> str | None:
        """The autograd node; needs C++ frames."""
        matches = (NODE.search(frame["name"]) for frame in self.frames)
        return next((match[1] for match in matches if match), None)

    @cached_property
    def operator_name(self) -> str | None:
        """The operator in C++ frames, else the function of torch's Python code that was called."""
        operator = self._operator
        return shown_operator(f"aten::{operator}") if operator else self._called()

    @cached_property
    def kind(self) -> str:
        """``copy``, ``factory`` or ``computed``, by the operator's name."""
        operator = self._operator
        if operator == "_to_copy":
            # ``to_dtype`` is no copy between devices: autocast's casts, ``x.half()``.
            return "computed" if "to_dtype" in self._symbols else "copy"
        base = operator or (self._called() or "").rpartition(".")[2]
        return "factory" if _is_factory(base) else "computed"

    @property
    def _operator(self) -> str | None:
        """The innermost operator that does more than allocate, without its overload.

        A block of ``relu`` is allocated by ``empty_memory_format``, called by ``empty_like``.
        """
        called = [_without_overload(symbol) for symbol in self._symbols]
        computing = (operator for operator in called if not _is_factory(operator))
        return next(computing, called[-1] if called else None)

    @cached_property
    def _symbols(self) -> list[str]:
        """The functions of ``at::_ops`` below Python, innermost first; needs C++ frames."""
        return [match[1] for name in self._native if (match := OPERATOR.search(name))]

    @property
    def _native(self) -> list[str]:
        """The functions below Python, innermost first; needs C++ frames."""
        cpp = takewhile(lambda frame: not frame["filename"].endswith(".py"), self.frames)
        return [frame["name"] for frame in cpp]

    def _called(self) -> str | None:
        """Return the outermost function of torch between the allocation and the user's code."""
        called = None
        for frame in self.frames:
            filename = frame["filename"]
            if not filename.endswith(".py"):
                continue
            if not filename.startswith(_TORCH):
                break
            called = f"{Path(filename).stem}.{frame['name']}"
        return called


def _is_factory(operator: str) -> bool:
    return operator.lstrip("_").startswith(_FACTORIES)


@cache
def _without_overload(symbol: str) -> str:
    """Return ``sum`` for ``sum_dim_IntList``, as ``at::_ops`` names ``aten::sum.dim_IntList``."""
    parts = symbol.split("_")
    for end in range(len(parts), 0, -1):
        name, overload = "_".join(parts[:end]), "_".join(parts[end:]) or "default"
        operator = getattr(torch.ops.aten, name, None) if name.strip("_") else None
        if operator is not None and overload in operator.overloads():
            return name
    return symbol


class RecordedHistory:
    """A recorder of real devices: the history since :meth:`during` began.

    Splits are unknown, because the recorded sizes are requested sizes.
    """

    def __init__(self) -> None:
        self._start: Sequence[int] = ()

    @contextmanager
    def during(self, stacks: str) -> Iterator[None]:
        """Record the allocator's events and their stacks inside.

        ``stacks`` is ``python`` or ``all`` (C++ frames too, where torch can unwind them).
        """
        if not _unwinds_cpp():
            stacks = "python"
        torch.cuda.memory._record_memory_history("all", context="all", stacks=stacks)
        try:
            self._start = self.positions()
            yield
        finally:
            torch.cuda.memory._record_memory_history(None)

    def positions(self) -> Sequence[int]:
        """Return the number of allocations and frees, by device."""
        if not torch.cuda.is_initialized():
            return ()
        stats = map(torch._C._cuda_memoryStats, range(torch.cuda.device_count()))
        counts = (each["allocation"]["all"] for each in stats)
        return [each["allocated"] + each["freed"] for each in counts]

    def held(self, device: int) -> list[tuple[int, int, Origin | None]]:
        """Return address, bytes and origin of every live block."""
        return [
            (block["address"], block["size"], _origin(block))
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]

    def events(self, device: int, begin: int) -> Iterator[Event]:
        """Yield the events from position ``begin`` on, one for each position.

        Sizes are requested sizes, rounded; a large block that was not split can be larger.
        """
        counted = [entry for entry in _trace(device) if entry["action"] in _ACTIONS]
        for entry in counted[max(begin - position_on(device, self._start), 0) :]:
            is_alloc = entry["action"] == "alloc"
            nbytes = round_size(entry["size"])
            yield Event(is_alloc, entry["addr"], nbytes, _origin(entry) if is_alloc else None)

    def reserved(self, device: int, begin: int) -> Sequence[int]:
        """Return the bytes held from the driver at position ``begin``, and after each event.

        A segment's allocation counts with the following event, the allocation that needed it.
        """
        position = position_on(device, self._start)
        changes = [0]
        for entry in _trace(device):
            if position >= begin:
                changes[-1] += SUPPLY.get(entry["action"], 0) * entry["size"]
            if entry["action"] in _ACTIONS:
                position += 1
                if position > begin:
                    changes.append(0)
        last = changes.pop()
        now = torch.cuda.memory_reserved(device)
        series = list(accumulate(changes, initial=now - last - sum(changes)))
        series[-1] = now
        return series

    def segments(self, device: int) -> Segments:
        """Return an empty list, as splits are unknown."""
        return ()

    def splits(self, device: int, begin: int, segments: Segments) -> Sequence[int]:
        """Return an empty list, as splits are unknown."""
        return ()

    def last_failure(self, device: int) -> tuple[int, Origin | None] | None:
        """Return the position and the origin of the last allocation that found no memory."""
        position = position_on(device, self._start)
        failure = None
        for entry in _trace(device):
            if entry["action"] == "oom":
                failure = position, _origin(entry)
            position += entry["action"] in _ACTIONS
        return failure


_ACTIONS = ("alloc", "free_requested")


def _trace(device: int) -> list[dict[str, Any]]:
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[device] if device < len(traces) else []


def _origin(entry: dict[str, Any]) -> RecordedOrigin | None:
    frames = entry.get("frames")
    return RecordedOrigin(frames) if frames else None


class SimulatedRecorder:
    """A recorder of the simulated GPUs, whose blocks and events are always recorded."""

    def __init__(self, simulation: SimulatedMachine) -> None:
        self._gpus = simulation.gpus

    def positions(self) -> tuple[int, ...]:
        """Return the number of events of each device."""
        return tuple([gpu.allocator.trace.position for gpu in self._gpus])

    def held(self, device: int) -> list[tuple[int, int, Origin | None]]:
        """Return address, bytes and origin of every live block."""
        memory = self._gpus[device].allocator
        contexts = memory.live_contexts()
        return [
            (address, nbytes, contexts[address]) for address, nbytes in memory.live_blocks().items()
        ]

    def events(self, device: int, begin: int) -> Iterator[Event]:
        """Yield the events from position ``begin`` on, one for each position."""
        for action, address, size, _, context in self._gpus[device].allocator.trace.raw(begin):
            if action == "alloc":
                yield Event(True, address, context.nbytes if context else size, context)
            else:
                # A free that waits for a stream counts from the request on.
                freed = action in (FREE, "free_requested")
                yield Event(False, address if freed else 0, 0, None)

    def reserved(self, device: int, begin: int) -> Sequence[int]:
        """Return the bytes held from the driver at position ``begin``, and after each event."""
        memory = self._gpus[device].allocator
        changes = [SUPPLY.get(action, 0) * size for action, _, size, *_ in memory.trace.raw(begin)]
        return list(accumulate(changes, initial=memory.reserved - sum(changes)))

    def segments(self, device: int) -> Segments:
        """Return the segments held from the driver now, in the form of a snapshot."""
        return self._gpus[device].allocator.segments(frames=False)

    def splits(self, device: int, begin: int, segments: Segments) -> Sequence[int]:
        """Return the bytes of free parts of segments in use, as :meth:`reserved` does.

        ``segments`` are those at position ``begin``. Empty if the number computed from the events
        differs from the allocator's.
        """
        memory = self._gpus[device].allocator
        splits = Splits(segments)
        series = [splits.bytes, *splits.after(memory.trace.raw(begin))]
        return series if series[-1] == memory.inactive_split else ()

    def last_failure(self, device: int) -> tuple[int, Origin | None] | None:
        """Return the position and the origin of the last allocation that found no memory."""
        failure = None
        for position, event in enumerate(self._gpus[device].allocator.trace.raw(0)):
            if event[0] == "oom":
                failure = position, event[-1]
        return failure


Recorder = RecordedHistory | SimulatedRecorder
"""The recorded events of every device."""

LONGEST_NAME = 120
"""Characters of a test's id in a file name; the rest is replaced by a digest."""


def _unwinds_cpp() -> bool:
    """Return whether torch can unwind C++ frames; else it warns or raises at an allocation.

    Source: torch/csrc/profiler/unwind/unwind.cpp; Arm is in the first release known to have it.
    """
    if platform.system() != "Linux":
        return False
    arm = ("aarch64",) if parse_version(None) >= (2, 13) else ()
    return platform.machine() in ("x86_64", *arm)


def write_snapshot(folder: Path, nodeid: str) -> Path:
    """Write the allocator's snapshot as a pickle that PyTorch's memory_viz opens; return its path.

    Raises ``OSError`` where the folder cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9._\[\]-]+", "-", nodeid)
    if name != nodeid or len(name) > LONGEST_NAME:
        # Without the digest, two ids could share a file name because of replaced characters.
        name = f"{name[:LONGEST_NAME]}-{sha256(nodeid.encode()).hexdigest()[:8]}"
    path = folder / f"{name}.pickle"
    replace_file(path, pickle.dumps(torch.cuda.memory._snapshot()))
    return path
