"""``gpumem gpus``: the GPUs of this host, the processes that use them, and waiting tests."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli.command import Answer, Argument, Command, above_zero, table, terminal_width
from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlReading, read_all
from pytest_gpumem.quoting import printable
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import shorten

if TYPE_CHECKING:
    from pytest_gpumem.sharing.ledger import Ledger
    from pytest_gpumem.sharing.watched import WatchedProcess


def run(arguments: argparse.Namespace) -> Answer | int:
    """Show the GPUs once, or repeatedly and with the tests that pytest runs."""
    if arguments.watch is None:
        if arguments.once:
            raise ValueError("--once goes with --watch; without --watch, the GPUs are read once")
        return look()
    from pytest_gpumem.sharing.database import default_folder
    from pytest_gpumem.sharing.watched import watching

    folder = default_folder()

    def text() -> list[str]:
        return look(folder).texts(as_json=arguments.json)

    with suppress(KeyboardInterrupt), watching(folder):
        if arguments.once:
            time.sleep(arguments.watch)
            print(*text(), sep="\n")
        else:
            watch(text, arguments.watch)
    return 0


def look(folder: Path | None = None) -> Answer:
    """Return the current state of the GPUs, and of the runs that use ``folder``."""
    devices, trouble = found_devices()
    data: dict[str, Any] = {"devices": devices, "nvml": trouble}
    width = terminal_width()
    if folder is None:
        return Answer(device_lines(devices, trouble, width), lambda: data)

    from pytest_gpumem.sharing.watched import runs

    seen = runs(folder)
    found = [*device_lines(devices, trouble, width), "", *run_lines(seen, time.time())]
    return Answer(
        (line[:width] for line in map(printable, found)),
        lambda: {**data, "runs": list(map(asdict, seen))},
    )


def run_lines(seen: Sequence[WatchedProcess], now: float) -> Iterator[str]:
    """Yield the lines on runs of pytest, at the time ``now``."""
    if not seen:
        yield "no pytest has begun a measured test since this looks"
    for one in seen:
        worker = f", worker {one.worker}" if one.worker else ""
        tests = "1 measured test" if one.finished == 1 else f"{one.finished} measured tests"
        yield f"pytest in {one.folder} (PID {one.process.pid}{worker}): {tests} so far"
        if one.test is not None:
            yield f"  runs  {one.test}  {max(now - one.since, 0):.0f} s on {one.device}"
        if one.last is not None:
            peak = "" if one.last_peak is None else f"  peak {format_size(one.last_peak)}"
            yield f"  last  {one.last}{peak}"


# ECMA-48 and xterm's private modes, which tmux and screen support too.
_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen, without a cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def frame(lines: Sequence[str], columns: int, rows: int) -> str:
    """Return the text that paints ``lines`` over a terminal of that size.

    Lines are overwritten without clearing them first, so that nothing flickers. Lines that do not
    fit are left out, and the last row gives their number.
    """
    shown = [shorten(line, columns) for line in lines]
    if len(shown) > rows:
        hidden = len(shown) - rows + 1
        shown = [*shown[: rows - 1], shorten(f"... {hidden} more lines", columns)]
    return _HOME + "\r\n".join(line + _END_OF_LINE for line in shown) + _END_OF_SCREEN


def watch(lines: Callable[[], Sequence[str]], seconds: float) -> None:
    """Show ``lines`` again every ``seconds`` until Ctrl-C, and restore the terminal.

    To a file or a pipe they are written again and again.
    """
    out = sys.stdout
    with suppress(KeyboardInterrupt):
        if not out.isatty():
            while True:
                print(*lines(), sep="\n", flush=True)
                time.sleep(seconds)
        out.write(_ENTER)
        try:
            while True:
                found = lines()
                out.write(frame(found, *shutil.get_terminal_size()))
                out.flush()
                time.sleep(seconds)
        finally:
            out.write(_LEAVE)
            out.flush()


BAR = 20
"""Width of the bar of a device's memory."""
COLUMNS, LEFT = 7, (0, 2, 3, 6)
"""Number of columns of the table of processes, and the columns that are aligned to the left."""
UNNOTICED = 64 * 2**20
"""The most bytes that a driver uses on an unused device."""


def found_devices() -> tuple[list[dict[str, Any]], str | None]:
    """Return all devices as builtin types, and the reason if NVML shows none."""
    from pytest_gpumem.sharing.database import default_folder
    from pytest_gpumem.sharing.devices import simulated_devices
    from pytest_gpumem.sharing.ledger import FILE_NAME, Ledger

    folder = default_folder()
    readings = read_all()
    trouble = readings.reason if isinstance(readings, NvmlAbsent) else None
    devices = [] if isinstance(readings, NvmlAbsent) else list(map(_of_reading, readings))
    for device in simulated_devices(folder):
        if taken := device.taken():
            empty = {"name": None, "gpu_percent": None}
            held = [{"pid": pid, **empty, "used": used} for pid, used in taken.items()]
            total = sum(taken.values())
            devices.append(_device(device.name, "simulated", device.capacity, total, held))
    if (folder / FILE_NAME).exists():
        ledger = Ledger(folder)
        with closing(ledger):
            _enter(devices, ledger)
    return devices, trouble


def device_lines(
    devices: Sequence[Mapping[str, Any]], trouble: str | None, width: int
) -> Iterator[str]:
    """Yield the lines of output in ``width`` columns."""
    if not devices:
        yield f"no GPU: {trouble}" if trouble else "no GPU"
    for number, device in enumerate(devices):
        if number:
            yield ""
        yield "  ".join(filter(None, (device["name"], device["model"], ", ".join(device["mode"]))))
        yield f"  {_memory(device)}"
        rows = list(_rows(device))
        used = [index for index in range(COLUMNS) if any(row[index] for row in rows)]
        cells = [[row[index] for index in used] for row in rows]
        left = [position for position, index in enumerate(used) if index in LEFT]
        for line in table(cells, left=left) if rows else ():
            yield shorten(f"  {line}", width)


def _memory(device: Mapping[str, Any]) -> str:
    total, used = device["limit"] or device["total"], device["used"]
    full = min(round(BAR * used / total), BAR) if total else BAR
    facts = [f"{'█' * full}{'·' * (BAR - full)}  {format_size(used)} of {format_size(total)}"]
    for name, key in (("kernels", "busy"), ("memory", "memory_busy")):
        facts += [] if device[key] is None else [f"{name} {device[key]} %"]
    return "  ".join(facts)


def _rows(device: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each process: action, bytes, PID, worker, seconds, load, test or name."""
    percent = {
        one["pid"]: "" if one["gpu_percent"] is None else f"{one['gpu_percent']} %"
        for one in device["processes"]
    }
    for verb in ("runs", "waits"):
        for test in device[verb]:
            pid, since = test["pid"], f"{test['seconds']:.0f} s"
            alone = verb == "runs" and test["alone"]
            size = "alone" if alone else format_size(test["bytes"])
            busy = percent.get(pid, "") if verb == "runs" else ""
            yield verb, size, f"PID {pid}", test["worker"], since, busy, test["nodeid"]
    for worker in device["workers"]:
        held = format_size(worker["context"] + worker["fixtures"])
        busy = percent.get(worker["pid"], "")
        yield "holds", held, f"PID {worker['pid']}", "", "", busy, "between tests"
    owners = {one["pid"] for verb in ("runs", "waits", "workers") for one in device[verb]}
    for process in device["processes"]:
        if process["pid"] not in owners:
            size = "?" if process["used"] is None else format_size(process["used"])
            busy = percent[process["pid"]]
            yield "other", size, f"PID {process['pid']}", "", "", busy, process["name"] or ""
    if device["unattributed"]:
        size = format_size(device["unattributed"])
        yield "other", size, "", "", "", "", "of no process that can be seen here"


def _of_reading(reading: NvmlReading) -> dict[str, Any]:
    processes = [asdict(one) for one in reading.others or ()]
    model = reading.name.partition(" MIG")[0]
    rest = reading.used - sum(one["used"] or 0 for one in processes)
    return {
        **_device(reading.uuid, model, reading.total, reading.used, processes),
        "mode": list(reading.mode.words),
        "limit": reading.mode.limit,
        "driver": reading.driver,
        "busy": reading.gpu_percent,
        "memory_busy": reading.memory_percent,
        "unattributed": rest if rest >= UNNOTICED else 0,
    }


def _device(
    name: str, model: str, total: int, used: int, processes: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "model": model,
        "mode": [],
        "driver": None,
        "total": total,
        "limit": None,
        "used": used,
        "unattributed": 0,
        "busy": None,
        "memory_busy": None,
        "processes": processes,
        "runs": [],
        "waits": [],
        "workers": [],
    }


def _enter(devices: list[dict[str, Any]], ledger: Ledger) -> None:
    from pytest_gpumem.sharing.admission import Budget

    state = ledger.state({device["name"]: Budget(device["total"]) for device in devices})
    pids = {worker: process.pid for worker, process in ledger.owners().items()}
    now = time.time()
    for device in devices:
        name = device["name"]
        for verb, tests in (("runs", state.running), ("waits", state.waiting)):
            device[verb] = [
                {
                    "nodeid": test.nodeid,
                    "run": test.run,
                    "worker": test.worker,
                    "pid": test.pid,
                    "bytes": test.needs[name],
                    "alone": test.exclusive,
                    "seconds": round(now - test.since, 3),
                }
                for test in tests
                if name in test.needs
            ]
        found = state.devices[name]
        busy = {test.owner for test in state.running if name in test.needs}
        # Workers that hold memory of it and run no test on it.
        device["workers"] = [
            {"pid": pids[worker], "context": context, "fixtures": found.fixtures[worker]}
            for worker, context in found.contexts.items()
            if worker in pids and worker not in busy and context + found.fixtures[worker] > 0
        ]


COMMAND = Command(
    description="Show each GPU of this host, its partition and load, the memory that processes "
    "hold, the tests that share it under --gpumem-share and those that wait; with --watch also "
    "the current test of each running pytest, and the peak of its last one. A run is shown from "
    "the first test that begins after this command.",
    run=run,
    arguments=(
        Argument(
            "--watch SECONDS",
            "repeat until Ctrl-C, by default every second",
            nargs="?",
            type=above_zero("seconds"),
            const=1.0,
        ),
        Argument("--once", "with --watch: show the state once, after that time, and end"),
    ),
    shows_state=True,
    json="as JSON, a line for each reading; sizes in bytes",
    examples=("gpumem gpus --watch",),
)
