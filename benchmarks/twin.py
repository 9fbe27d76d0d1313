"""The twin run: the same programs on a real GPU and on the simulated one, event by event.

    python benchmarks/twin.py                     on this machine's CUDA device
    python benchmarks/twin.py NAME...             scenarios whose name contains one of these
    python benchmarks/twin.py --recorded FILE     simulate again what a GPU did; needs none
    python benchmarks/twin.py --device sim        a simulated device against itself: all exact
    python benchmarks/twin.py --list

Writes ``benchmarks/evidence/<gpu>-torch<version>.json`` and prints a table. What the file has
already is not done again: the real part while the scenario is the same, the simulated part while
the simulation is, too (``--fresh`` does everything). Stops handing out scenarios after
``--minutes``; the next run goes on. Needs torch with CUDA and pytest; nvidia-ml-py for the driver's
version, transformers for its models; not jsonschema. Where this package is not installed, say
``PYTHONPATH=. python benchmarks/twin.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scenarios import Scenario, scenarios
from twin_worker import unpacked

from pytest_gpumem.jsonfile import replace_file

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = Path(__file__).resolve().parent / "evidence"
LONGEST = 180.0
"""Seconds that one scenario may take."""
STAND_IN = "H200"
FORMAT = 1

SETTINGS = (
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_CUBLAS_WORKSPACE_CACHE"),
)
"""Variables of the environment that are removed for both devices."""

LIBRARIES = ("torch", "cuda", "cudnn", "transformers")
"""Of an environment; what was made with others is made again."""

Json = dict[str, Any]


class WorkerError(Exception):
    """A worker process that cannot be used."""


class Process:
    """A worker process of one kind under one allocator setting."""

    def __init__(self, command: Sequence[str], alloc_conf: str, *, sees_gpu: bool) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
        environment["PYTHONPATH"] = str(ROOT)
        if sees_gpu:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = alloc_conf
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.alloc_conf = alloc_conf
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("twin_worker.py")), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.hello = self._answer()
        if "error" in self.hello:
            self.close()
            raise WorkerError(self.hello["error"])

    def make(self, name: str) -> Json:
        """Return what came of a scenario; a process that ends or hangs is part of the answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{name}\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return {"error": "the process has ended", "clean": False}
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> Json:
        try:
            line = self._lines.get(timeout=LONGEST)
        except queue.Empty:
            return {"error": f"took longer than {LONGEST:.0f} s", "clean": False}
        if not line:
            return {"error": f"the process ended with {self._child.wait()}", "clean": False}
        answer: Json = json.loads(line)
        return answer


@dataclass
class Crew:
    """Threads that run scenarios of one kind, each with its own process."""

    command: tuple[str, ...]
    done: Callable[[Scenario, Json], None]
    todo: list[Scenario]
    deadline: float
    isolated: bool = False
    sees_gpu: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, count: int) -> list[threading.Thread]:
        """Begin, with so many processes; returns what to wait for."""
        self.todo.sort(key=lambda scenario: scenario.alloc_conf)
        threads = [threading.Thread(target=self._work) for _ in range(min(count, len(self.todo)))]
        for thread in threads:
            thread.start()
        return threads

    def _work(self) -> None:
        process: Process | None = None
        started = False
        while (scenario := self._next()) is not None:
            # A real allocator reads its settings once; a simulated device is a new one each time.
            other = process is not None and process.alloc_conf != scenario.alloc_conf
            if process is not None and other and self.sees_gpu:
                process.close()
                process = None
            try:
                if process is None:
                    process = Process(self.command, scenario.alloc_conf, sees_gpu=self.sees_gpu)
                started = True
                answer = process.make(scenario.name)
            except WorkerError as error:
                if not started:  # a GPU that takes one process only, say: others may do the work
                    print(f"a process cannot be used: {error}", file=sys.stderr)
                    with self._lock:
                        self.todo.insert(0, scenario)
                    return
                answer = {"error": str(error)}
            clean = answer.pop("clean", False)
            if process is not None and (self.isolated or not clean):
                process.close()
                process = None
            self.done(scenario, answer)
        if process is not None:
            process.close()

    def _next(self) -> Scenario | None:
        with self._lock:
            if not self.todo or time.monotonic() > self.deadline:
                return None
            return self.todo.pop(0)


Made = tuple[tuple[str, ...], Callable[[Scenario, Json], None]]
"""A kind's command, and where its answers go."""


def finish(crews: Sequence[Crew], jobs: int) -> None:
    """Run all ``crews`` at the same time until their scenarios are done."""
    for thread in [thread for crew in crews for thread in crew.start(jobs)]:
        thread.join()


# One scenario, compared.

OTHER_PLACES = "equal events, other blocks or segments"
"""Torch breaks ties between free blocks by address, and the driver puts segments first where an
earlier scenario of the process gave its own back. On an H100 (driver 580) addresses that rise, as
there, explain six of seven such differences. So these are made again, each in its own process."""


def compared(real: Json, simulated: Json) -> Json:
    """Return how the two agree."""
    if "error" in real or "error" in simulated:
        alike = (
            real.get("error", "").partition(":")[0] == simulated.get("error", "").partition(":")[0]
        )
        sides = (("real", real), ("simulated", simulated))
        cause = "; ".join(f"{name} {side['error']}" for name, side in sides if "error" in side)
        return {"error": True, "same_error": alike, "cause": cause}
    there, here = unpacked(real["events"]), unpacked(simulated["events"])
    measured, made = real["statistics"], simulated["statistics"]
    first = first_difference(there, here)
    result: Json = {
        "events": len(there),
        "events_exact": first is None,
        "reordered": first is not None and sorted(there) == sorted(here),
        "peak_allocated_exact": measured["peak_allocated"] == made["peak_allocated"],
        "peak_reserved_exact": measured["peak_reserved"] == made["peak_reserved"],
        "relative": (made["peak_allocated"] - measured["peak_allocated"])
        / max(measured["peak_allocated"], 1),
    }
    if first is not None:
        result["cause"] = cause_of(first, real, simulated, there, here)
    elif not result["peak_allocated_exact"] or not result["peak_reserved_exact"]:
        result["cause"] = OTHER_PLACES
    return result


def first_difference(there: Sequence[int], here: Sequence[int]) -> int | None:
    """Index of the first event that differs; ``None`` if all are equal."""
    for index, (one, other) in enumerate(zip(there, here)):  # noqa: B905  # shorter one counts
        if one != other:
            return index
    return None if len(there) == len(here) else min(len(there), len(here))


def cause_of(
    first: int, real: Json, simulated: Json, there: Sequence[int], here: Sequence[int]
) -> str:
    """Say in words where two sequences part."""
    return (
        f"event {first}: real {_event(there, first)} {_origin(real, first)}, "
        f"simulated {_event(here, first)} {_origin(simulated, first)}"
    )


def _event(events: Sequence[int], index: int) -> str:
    return f"{events[index]:+,}" if index < len(events) else "nothing"


def _origin(side: Json, index: int) -> str:
    """Return the origin of the last allocation up to ``index``."""
    if "origins" not in side:
        return "(origin not kept)"
    numbers = unpacked(side["origin_of"])[: index + 1]
    texts = (side["origins"][number] for number in reversed(numbers))
    found = next((text for text in texts if text), "unknown")
    is_free = index < len(unpacked(side["events"])) and unpacked(side["events"])[index] < 0
    return f"({'after ' * is_free}{found})"


# The evidence.


def simulation_digest() -> str:
    """Return the digest of the code that simulates."""
    files = sorted((ROOT / "pytest_gpumem" / "simulated").rglob("*.py"))
    return hashlib.sha256(b"\0".join(map(Path.read_bytes, files))).hexdigest()[:16]


def evidence_path(hello: Json, stand_in: bool) -> Path:
    """Return the file for the evidence of this GPU and torch."""
    gpu = re.sub(r"[^A-Za-z0-9._-]+", "-", hello["machine"]["name"])
    release = hello["torch"].partition("+")[0]
    return EVIDENCE / f"{'simulated-' * stand_in}{gpu}-torch{release}.json"


def alike(one: Json, other: Json) -> bool:
    """Whether numbers of these two environments may stand in one file."""
    return all(one.get(library) == other.get(library) for library in LIBRARIES)


class Evidence:
    """The file of one GPU and torch version: what each did, and how they agree."""

    def __init__(self, path: Path, environment: Json) -> None:
        self.path = path
        self.data: Json = {"format": FORMAT, "environment": environment, "scenarios": {}}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.get("format") == FORMAT and alike(stored["environment"], environment):
                self.data["scenarios"] = stored["scenarios"]
        self.simulation = simulation_digest()
        self._real: dict[str, Json] = {}
        self._simulated: dict[str, Json] = {}
        self._lock = threading.Lock()
        self._written = time.monotonic()

    @property
    def entries(self) -> dict[str, Json]:
        """By scenario."""
        entries: dict[str, Json] = self.data["scenarios"]
        return entries

    def cause(self, scenario: Scenario) -> str | None:
        """Why the two differ, if they do."""
        return self.entries.get(scenario.name, {}).get("cause")

    def forget(self, known: Iterable[Scenario]) -> None:
        """Drop what is stored of these."""
        for scenario in known:
            self.entries.pop(scenario.name, None)

    def lacks_real(self, scenario: Scenario) -> bool:
        """Whether it has to be made on the real device."""
        return self.entries.get(scenario.name, {}).get("scenario") != scenario.digest

    def lacks_simulated(self, scenario: Scenario) -> bool:
        """Whether it has to be simulated."""
        entry = self.entries.get(scenario.name, {})
        return self.lacks_real(scenario) or entry.get("simulation") != self.simulation

    def take_real(self, scenario: Scenario, answer: Json) -> None:
        """Keep what the real device did."""
        with self._lock:
            self._real[scenario.name] = answer
            self._settle(scenario)

    def take_simulated(self, scenario: Scenario, answer: Json) -> None:
        """Keep what the simulated device did."""
        with self._lock:
            self._simulated[scenario.name] = answer
            self._settle(scenario)

    def _settle(self, scenario: Scenario) -> None:
        stored = None if self.lacks_real(scenario) else self.entries[scenario.name]["real"]
        real = self._real.get(scenario.name, stored)
        simulated = self._simulated.get(scenario.name)
        if real is None or simulated is None:
            return
        self.entries[scenario.name] = {
            "scenario": scenario.digest,
            "simulation": self.simulation,
            "real": {key: real[key] for key in ("statistics", "events", "error") if key in real},
            "simulated": {
                key: simulated[key] for key in ("statistics", "error") if key in simulated
            },
            **compared(real, simulated),
        }
        if time.monotonic() - self._written > 10:
            self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self.data["summary"] = summary(self.entries.values())
        self.data["scenarios"] = dict(sorted(self.entries.items()))
        text = json.dumps(self.data, indent=1, ensure_ascii=True)
        replace_file(self.path, f"{text}\n".encode())
        self._written = time.monotonic()


def summary(entries: Iterable[Json]) -> Json:
    """Count how often the two agree."""
    entries = list(entries)
    ran = [entry for entry in entries if not entry.get("error")]
    relative = [abs(entry["relative"]) for entry in ran]
    return {
        "scenarios": len(entries),
        "not_compared": len(entries) - len(ran),
        "events_exact": sum(entry["events_exact"] for entry in ran),
        "peak_allocated_exact": sum(entry["peak_allocated_exact"] for entry in ran),
        "peak_allocated_within_1_percent": sum(value <= 0.01 for value in relative),
        "peak_reserved_exact": sum(entry["peak_reserved_exact"] for entry in ran),
        "worst_relative": max(relative, default=0.0),
        "median_relative": statistics.median(relative) if relative else 0.0,
    }


def table(title: str, entries: dict[str, Json]) -> Iterator[str]:
    """Lines: the totals, and each scenario that differs with its cause."""
    totals = summary(entries.values())
    ran = max(totals["scenarios"] - totals["not_compared"], 1)
    yield title
    yield f"  scenarios                  {totals['scenarios']:6}"
    yield f"  not compared               {totals['not_compared']:6}"
    for name, key in (
        ("events exact", "events_exact"),
        ("peak allocated exact", "peak_allocated_exact"),
        ("peak allocated within 1 %", "peak_allocated_within_1_percent"),
        ("peak reserved exact", "peak_reserved_exact"),
    ):
        yield f"  {name:26} {totals[key]:6}  {100 * totals[key] / ran:5.1f} %"
    yield f"  worst peak allocated       {100 * totals['worst_relative']:6.2f} %"
    marks = ("events_exact", "peak_allocated_exact", "peak_reserved_exact")
    for name, entry in sorted(entries.items()):
        if entry.get("error"):
            yield f"{name}: not compared: {entry['cause']}"
        elif not all(entry[mark] for mark in marks):
            off = f"{100 * entry['relative']:+.2f} %"
            order = ", only the order differs" if entry["reordered"] else ""
            yield f"{name}: peak allocated {off}{order}: {entry['cause']}"


# The command.


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--recorded", type=Path, metavar="FILE")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="instead of its own name")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--isolate", action="store_true", help="a process for each real scenario")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of each kind")
    return parser.parse_args(arguments)


def selected(names: Sequence[str]) -> list[Scenario]:
    """The scenarios that can run here and whose name contains one of ``names``; all without."""
    return [
        scenario
        for scenario in scenarios().values()
        if scenario.possible and (not names or any(name in scenario.name for name in names))
    ]


def opened(options: argparse.Namespace) -> tuple[Evidence, str]:
    """Return the evidence to go on with, and the kind of its real part."""
    if options.recorded:
        stored = json.loads(options.recorded.read_text(encoding="utf-8"))
        return Evidence(options.evidence or options.recorded, stored["environment"]), "recorded"
    kind = "real" if options.device == "cuda" else "stand-in"
    if kind == "real" and not torch.cuda.is_available():
        raise WorkerError(f"torch {torch.__version__} sees no CUDA device")
    process = Process((kind, STAND_IN), "", sees_gpu=kind == "real")
    process.close()
    path = options.evidence or evidence_path(process.hello, kind == "stand-in")
    return Evidence(path, process.hello), kind


def main() -> int:
    """Make what is missing, write the evidence and print the table; 1 where something is left."""
    options = parsed()
    chosen = selected(options.names)
    if options.list:
        print(*(f"{one.name:60} {one.alloc_conf}".rstrip() for one in chosen), sep="\n")
        return 0
    started = time.monotonic()
    try:
        evidence, kind = opened(options)
    except WorkerError as error:
        sys.exit(f"no device to compare with ({error}); --device sim simulates one")
    if options.recorded:
        chosen = [one for one in chosen if not evidence.lacks_real(one)]
    elif options.fresh:
        evidence.forget(chosen)
    deadline = started + 60 * options.minutes
    environment = evidence.data["environment"]
    machine = json.dumps(environment["machine"])
    simulated: Made = ("simulated", machine, environment["torch"]), evidence.take_simulated
    real: Made = (kind, machine, environment["torch"]), evidence.take_real
    lacking = [one for one in chosen if options.recorded or evidence.lacks_simulated(one)]
    measured = [one for one in chosen if kind != "recorded" and evidence.lacks_real(one)]
    is_real = kind == "real"
    finish(
        [
            Crew(*simulated, lacking, deadline),
            Crew(*real, [*measured], deadline, isolated=options.isolate, sees_gpu=is_real),
        ],
        options.jobs,
    )
    if is_real and not options.isolate:
        again = [one for one in measured if evidence.cause(one) == OTHER_PLACES]
        finish([Crew(*real, again, deadline, isolated=True, sees_gpu=True)], options.jobs)
    evidence.write()
    gpu, release = environment["machine"]["full_name"], environment["torch"]
    title = f"{gpu} ({kind}), torch {release}; {time.monotonic() - started:.0f} s"
    shown = {one.name: evidence.entries[one.name] for one in chosen if one.name in evidence.entries}
    print(*table(title, shown), sep="\n")
    left = [one for one in chosen if evidence.lacks_simulated(one)]
    if left:
        print(f"{len(left)} scenarios are left; the same command goes on with them")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
