"""``gpumem replay SNAPSHOT``: the replay of a memory snapshot, also with other settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli.command import Answer, Argument, Command, parsed, table
from pytest_gpumem.quoting import MOST, printable, quoted
from pytest_gpumem.sizes import format_change, format_size, parse_size

if TYPE_CHECKING:
    from pytest_gpumem.allocator.replayed import DeviceReplay, ReplayResult, Shortage, Usage

UNKNOWN = "?"


def run(arguments: argparse.Namespace) -> Answer:
    """Replay; raises ``ValueError`` for bad input."""
    from pytest_gpumem.report.html.page import RECORDING, assembled
    from pytest_gpumem.report.html.recording import recording_of
    from pytest_gpumem.report.json_report import write_file
    from pytest_gpumem.simulated.gpu.replay import replay

    elsewhere = parsed("--used-elsewhere", parse_size, arguments.used_elsewhere)
    if elsewhere and arguments.gpu is None:
        raise ValueError("--used-elsewhere reduces the memory of a GPU; give its model with --gpu")
    page: Path | None = arguments.html
    if page is not None and page.resolve() == arguments.snapshot.resolve():
        raise ValueError(f"the page would replace the snapshot {page}; name another")
    result = replay(
        arguments.snapshot,
        arguments.alloc_conf,
        arguments.gpu,
        version=_release(arguments.torch),
        used_elsewhere=elsewhere,
        courses=page is not None,
    )
    if page is not None:
        notes = [note for device in result.devices for note in _notes(device, result, elsewhere)]
        name = arguments.snapshot.name
        found = recording_of(name, result, notes=notes, used_elsewhere=elsewhere)
        write_file(page, assembled("recording.html", RECORDING, *found).encode(), "--html")
    return Answer(
        lines(result, arguments.snapshot, elsewhere),
        lambda: to_dict(result, arguments.snapshot),
        failed=not (result.exact and result.out_of_memory is None),
    )


def to_dict(result: ReplayResult, path: Path) -> dict[str, Any]:
    """Return the JSON form: the fields of :class:`ReplayResult`, sizes in bytes."""
    devices = []
    for device in result.devices:
        entry = asdict(replace(device, courses=()))
        del entry["courses"]
        for name in ("recorded", "what_if"):
            usage: Usage | None = getattr(device, name)
            if usage is not None:
                entry[name]["fragmentation"] = usage.fragmentation
        devices.append(entry)
    return {
        "snapshot": str(path),
        **asdict(replace(result, devices=())),
        "version": _dotted(result),
        "out_of_memory": result.out_of_memory is not None,
        "devices": devices,
    }


def lines(result: ReplayResult, path: Path, used_elsewhere: int = 0) -> Iterator[str]:
    """Yield the lines of output."""
    names = ", ".join(f"cuda:{device.device}" for device in result.devices)
    count = sum(device.events for device in result.devices)
    events = f"{count:,} event{'s' if count != 1 else ''}"
    yield f"{path.name}: {events} on {names}, recorded with {_conf(result.recorded_conf)}"
    yield f"replayed by the rules of torch {_dotted(result)}: {_agreement(result)}"
    for device in result.devices:
        if (found := device.mismatch) is not None:
            place = "at the end" if found.event is None else f"at event {found.event:,}"
            line = f" ({found.line})" if found.line else ""
            yield f"  cuda:{device.device} differs first {place}{line}"
            yield f"    recorded   {found.expected}"
            yield f"    simulated  {found.got}"
    if result.what_if:
        yield ""
        tried = [] if result.alloc_conf is None else [_conf(result.alloc_conf)]
        if result.gpu is not None:
            size, used = (format_size(n or 0) for n in (result.devices[0].capacity, used_elsewhere))
            taken = f", {used} of it used elsewhere" if used_elsewhere else ""
            tried.append(f"on {result.gpu} ({size}{taken})")
        yield f"what if: {' '.join(tried)}"
    for device in result.devices:
        yield ""
        yield from _table(device)
    notes = [note for device in result.devices for note in _notes(device, result, used_elsewhere)]
    if any(device.what_if and device.capacity is None for device in result.devices):
        notes.append(
            "Whether it fits depends on the memory of the GPU, which is not on record; give --gpu."
        )
    if result.alloc_conf is not None and any(device.live_at_start for device in result.devices):
        notes.append(
            "What was allocated before recording began is placed anew, without the gaps it had."
        )
    if notes:
        yield ""
        yield from notes


def _agreement(result: ReplayResult) -> str:
    total = f"{result.total:,} address{'es' if result.total != 1 else ''}"
    if not result.total:
        return "no allocation is among the events; with a larger max_entries recording keeps more"
    if result.exact:
        agreed = "the one address agrees" if result.total == 1 else f"all {total} agree"
        return f"{agreed}, and so does the final layout"
    verb = "agrees" if result.exact_addresses == 1 else "agree"
    return f"{result.exact_addresses:,} of {total} {verb}"


def _table(device: DeviceReplay) -> Iterator[str]:
    rows = [[f"  cuda:{device.device}", "recorded"]]
    rows += [[f"  {label}", _cell(value(device.recorded))] for label, value in _ROWS.items()]
    if (tried := device.what_if) is not None:
        rows[0] += ["what if", "change"]
        for (label, value), row in zip(_ROWS.items(), rows[1:], strict=True):
            now, before = value(tried), value(device.recorded)
            unknown = label == "out of memory" and now == "no" and device.capacity is None
            change = now - before if isinstance(now, int) and isinstance(before, int) else 0
            row += [UNKNOWN if unknown else _cell(now), format_change(change) if change else ""]
    yield from table(rows, left=(0,))


_ROWS: dict[str, Callable[[Usage], int | str]] = {
    "peak allocated": lambda usage: usage.peak_allocated,
    "peak reserved": lambda usage: usage.peak_reserved,
    "fragmentation at the peak": lambda usage: usage.fragmentation,
    "share of peak reserved": lambda usage: (
        f"{100 * usage.fragmentation / max(usage.peak_reserved, 1):.1f} %"
    ),
    "largest inactive split": lambda usage: usage.largest_split,
    "segments": lambda usage: f"{usage.segments:,}",
    "out of memory": lambda usage: "yes" if usage.out_of_memory else "no",
}
"""The rows of the table: functions that return bytes or a text."""


def _cell(value: int | str) -> str:
    return format_size(value) if isinstance(value, int) else value


def _notes(device: DeviceReplay, result: ReplayResult, used_elsewhere: int) -> Iterator[str]:
    name = f"cuda:{device.device}"
    then = device.recorded.out_of_memory
    now = device.what_if.out_of_memory if device.what_if else None
    if then is not None:
        yield f"{name} ran out of memory in the recording: {_shortage(then, 'asked')}"
    if now is not None:
        yield f"{name} would run out of memory: {_shortage(now, 'asks')}"
        yield "  what comes after it is left out, so the peaks are those up to there"
    elif then is not None and device.what_if is not None:
        yield f"{name} would not run out of memory there"
    if device.what_if and device.capacity and now is None and result.gpu is not None:
        left = device.capacity - used_elsewhere - device.what_if.peak_reserved
        beside = "" if used_elsewhere else " for the CUDA context and others"
        yield f"{name} fits on {result.gpu}: {format_size(left)} are left{beside}"
        if retries := device.what_if.retries:
            times = "once" if retries == 1 else f"{retries:,} times"
            yield f"  the device was full {times} on the way, and the cache had to be emptied"


def _shortage(shortage: Shortage, asks: str) -> str:
    wanted = f"{format_size(shortage.requested)} with {format_size(shortage.free)} free"
    if shortage.event < 0:
        return f"what was allocated before recording began {asks} for {wanted}"
    at = f", at {shortage.line}" if shortage.line else ""
    return f"event {shortage.event:,} {asks} for {wanted}{at}"


def _conf(conf: str) -> str:
    given = f"PYTORCH_CUDA_ALLOC_CONF={printable(conf, MOST)}"
    return given if conf else "the allocator's default settings"


def _dotted(result: ReplayResult) -> str:
    return ".".join(map(str, result.version))


def _release(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", text)
    if found is None:
        raise ValueError(f"--torch: {quoted(text)} is not a release; write one like 2.6")
    return int(found[1]), int(found[2])


COMMAND = Command(
    description="Run the allocations and frees of a recorded torch memory snapshot through the "
    "simulated caching allocator, and compare every address. With --alloc-conf or --gpu, show "
    "the memory under other settings or on another GPU. Exit code 1 where the replay differs from "
    "the recording, or runs out of memory there; 2 where the snapshot cannot be replayed.",
    run=run,
    arguments=(
        Argument("snapshot SNAPSHOT", "what torch.cuda.memory._dump_snapshot() wrote", type=Path),
        Argument(
            "--alloc-conf CONF",
            "allocator settings to try, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True",
        ),
        Argument("--gpu MODEL", "GPU whose memory must suffice: A100-40GB"),
        Argument(
            "--used-elsewhere SIZE",
            "memory of the GPU outside the allocator, its CUDA context and other processes, like "
            "500MiB (default: 0)",
            default="0",
        ),
        Argument(
            "--torch RELEASE",
            "torch release whose rules hold, like 2.6 (default: as the snapshot's form suggests)",
        ),
        Argument("--html PATH", "write a page of every event, opened offline, too", type=Path),
    ),
    examples=(
        "gpumem replay snapshot.pickle",
        "gpumem replay snapshot.pickle --alloc-conf expandable_segments:True --gpu L4",
    ),
)
