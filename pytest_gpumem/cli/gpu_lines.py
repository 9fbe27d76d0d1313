"""The GPUs of this host, the holders of their memory, and waiting tests: as data and as lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli.columns import table
from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlReading, read_all
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import shorten

if TYPE_CHECKING:
    from pytest_gpumem.sharing.ledger import Lease, Ledger, State
    from pytest_gpumem.sharing.simulated_memory import SharedSimulatedDevice

BAR = 20
"""Columns of the picture of a device's memory."""
COLUMNS, LEFT = 7, (0, 2, 3, 6)
"""Number of columns of the table of holders, and those that are aligned to the left."""
UNNOTICED = 64 * 2**20
"""Bytes that a driver may hold of an unused device."""


def found() -> tuple[list[dict[str, Any]], str | None]:
    """Return every device as builtin types, and why NVML shows none, if it does not."""
    from pytest_gpumem.sharing.database import default_folder
    from pytest_gpumem.sharing.ledger import FILE_NAME, Ledger
    from pytest_gpumem.sharing.simulated_memory import simulated_devices

    folder = default_folder()
    readings = read_all()
    trouble = readings.reason if isinstance(readings, NvmlAbsent) else None
    devices = [] if isinstance(readings, NvmlAbsent) else list(map(_of_reading, readings))
    devices += [_of_simulated(device) for device in simulated_devices(folder) if device.taken()]
    if (folder / FILE_NAME).exists():
        ledger = Ledger(folder)
        try:
            _enter(devices, ledger)
        finally:
            ledger.close()
    return devices, trouble


def lines(devices: Sequence[Mapping[str, Any]], trouble: str | None, width: int) -> Iterator[str]:
    """Yield the lines of output in ``width`` columns."""
    if not devices:
        yield f"no GPU: {trouble}" if trouble else "no GPU"
    for number, device in enumerate(devices):
        if number:
            yield ""
        yield "  ".join(
            [device["name"], device["model"], *filter(None, [", ".join(device["mode"])])]
        )
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
    if device["busy"] is not None:
        facts.append(f"kernels {device['busy']} %")
    if device["memory_busy"] is not None:
        facts.append(f"memory {device['memory_busy']} %")
    return "  ".join(facts)


def _rows(device: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each holder: action, bytes, process, worker, seconds, load, test or name."""
    percent = {one["pid"]: _percent(one["gpu_percent"]) for one in device["processes"]}
    for verb in ("runs", "waits"):
        for test in device[verb]:
            pid = test["pid"]
            size = format_size(test["bytes"])
            if verb == "runs" and test["alone"]:
                size = "alone"
            since = f"{test['seconds']:.0f} s"
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


def _percent(value: int | None) -> str:
    return "" if value is None else f"{value} %"


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


def _of_simulated(device: SharedSimulatedDevice) -> dict[str, Any]:
    taken = device.taken()
    processes = [
        {"pid": pid, "name": None, "used": used, "gpu_percent": None} for pid, used in taken.items()
    ]
    return _device(device.name, "simulated", device.capacity, sum(taken.values()), processes)


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
    from pytest_gpumem.sharing.admission import Device

    state = ledger.state({device["name"]: Device(device["total"]) for device in devices})
    pids = {worker: process.pid for worker, process in ledger.owners().items()}
    now = time.time()
    for device in devices:
        for verb, leases in (("runs", state.running), ("waits", state.waiting)):
            device[verb] = [
                _test(lease, device["name"], now)
                for lease in leases
                if device["name"] in lease.request.needs
            ]
        device["workers"] = _between_tests(state, device["name"], pids)


def _between_tests(state: State, device: str, pids: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the workers that hold memory of ``device`` and run no test on it."""
    found = state.devices[device]
    busy = {lease.request.owner for lease in state.running if device in lease.request.needs}
    return [
        {
            "pid": pids[worker],
            "context": found.contexts[worker],
            "fixtures": found.fixtures[worker],
        }
        for worker in found.contexts
        if worker in pids
        and worker not in busy
        and found.contexts[worker] + found.fixtures[worker] > 0
    ]


def _test(lease: Lease, device: str, now: float) -> dict[str, Any]:
    return {
        "nodeid": lease.nodeid,
        "run": lease.run,
        "worker": lease.worker,
        "pid": lease.process.pid,
        "bytes": lease.request.needs[device],
        "alone": lease.request.exclusive,
        "seconds": round(now - lease.request.since, 3),
    }
