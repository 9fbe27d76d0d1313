"""``gpumem gpus``: the GPUs of this host, who holds what of them, and who waits."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlReading, read_all
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.sharing.ledger import Lease, State
    from pytest_gpumem.sharing.simulated_memory import SharedSimulatedDevice

CLEAR = "\x1b[H\x1b[J"
"""Of a terminal: to the top left, and nothing below."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "gpus",
        help="the GPUs of this host: who holds what, and who waits",
        description="Show each GPU of this host, what processes hold of it, the tests that share "
        "it under --gpumem-share and those that wait.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="again and again until Ctrl-C, every second if no other time is given",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is asked for; return 0."""
    while True:
        devices, trouble = found()
        if arguments.json:
            text = json.dumps({"devices": devices, "nvml": trouble})
        else:
            text = "\n".join(lines(devices, trouble))
        repeats = arguments.watch is not None
        print(f"{CLEAR}{text}" if repeats and sys.stdout.isatty() else text, flush=True)
        if not repeats:
            return 0
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:
            return 0


def found() -> tuple[list[dict[str, Any]], str | None]:
    """Return every device as builtin types, and why NVML shows none, if it does not."""
    from pytest_gpumem.sharing.admission import Device
    from pytest_gpumem.sharing.database import default_folder
    from pytest_gpumem.sharing.ledger import FILE_NAME, Ledger
    from pytest_gpumem.sharing.simulated_memory import simulated_devices

    folder = default_folder()
    readings = read_all()
    absent = isinstance(readings, NvmlAbsent)
    real = [] if isinstance(readings, NvmlAbsent) else readings
    devices = [
        *map(_of_reading, real),
        *(_of_simulated(device) for device in simulated_devices(folder) if device.taken()),
    ]
    if (folder / FILE_NAME).exists():
        ledger = Ledger(folder)
        state = ledger.state({device["name"]: Device(device["total"]) for device in devices})
        ledger.close()
        _enter(devices, state)
    return devices, readings.reason if absent else None  # type: ignore[union-attr]  # it is absent


def lines(devices: list[dict[str, Any]], trouble: str | None) -> Iterator[str]:
    """Yield what a person reads."""
    if not devices:
        yield f"no GPU: {trouble}" if trouble else "no GPU"
    for device in devices:
        busy = "" if device["busy"] is None else f", {device['busy']} % busy"
        yield (
            f"{device['name']}  {device['model']}  {format_size(device['used'])} of "
            f"{format_size(device['total'])} used{busy}"
        )
        owners = {test["pid"] for test in (*device["runs"], *device["waits"])}
        for verb in ("runs", "waits"):
            for test in device[verb]:
                yield (
                    f"  {verb:<5}  {format_size(test['bytes']):>10}  {test['worker']} "
                    f"(PID {test['pid']})  {test['nodeid']}  {test['seconds']:.0f} s"
                )
        for process in device["processes"]:
            if process["pid"] not in owners:
                size = "?" if process["used"] is None else format_size(process["used"])
                yield f"  other  {size:>10}  PID {process['pid']}  {process['name'] or ''}".rstrip()


def _of_reading(reading: NvmlReading) -> dict[str, Any]:
    others = reading.others or ()
    return _device(
        reading.uuid,
        " ".join(filter(None, (reading.name, reading.mode.partition))),
        reading.total,
        reading.used,
        reading.gpu_percent,
        [{"pid": one.pid, "name": one.name, "used": one.used} for one in others],
    )


def _of_simulated(device: SharedSimulatedDevice) -> dict[str, Any]:
    taken = device.taken()
    processes = [{"pid": pid, "name": None, "used": used} for pid, used in taken.items()]
    used = sum(taken.values())
    return _device(device.name, "simulated", device.capacity, used, None, processes)


def _device(
    name: str, model: str, total: int, used: int, busy: int | None, processes: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "model": model,
        "total": total,
        "used": used,
        "busy": busy,
        "processes": processes,
        "runs": [],
        "waits": [],
    }


def _enter(devices: list[dict[str, Any]], state: State) -> None:
    now = time.time()
    for device in devices:
        for verb, leases in (("runs", state.running), ("waits", state.waiting)):
            device[verb] = [
                _test(lease, device["name"], now)
                for lease in leases
                if device["name"] in lease.request.needs
            ]


def _test(lease: Lease, device: str, now: float) -> dict[str, Any]:
    return {
        "nodeid": lease.nodeid,
        "run": lease.run,
        "worker": lease.worker,
        "pid": lease.process.pid,
        "bytes": lease.request.needs[device],
        "seconds": round(now - lease.request.since, 3),
    }


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
