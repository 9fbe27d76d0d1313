"""One process of the twin run: makes scenarios on one device and says what was recorded.

    python benchmarks/twin_worker.py real|stand-in|simulated [MACHINE [TORCH]]

Reads names of scenarios, a line each; answers each with a line of JSON. ``real`` is the CUDA
device, ``stand-in`` a simulated one that is read like a real one, ``simulated`` one that is read
directly.
MACHINE is the JSON that a worker of a real device says first, or a name from the catalogue.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import sys
import time
import traceback
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from scenarios import Scenario, scenarios

from pytest_gpumem import simulate
from pytest_gpumem.device.cuda import CudaDevice
from pytest_gpumem.measurement.recorded import RecordedOrigin
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_gpu
from pytest_gpumem.values.errors import SimulationError

SIGNS = {"alloc": 1, "free_requested": -1}


def packed(numbers: Iterable[int]) -> str:
    """Numbers in a text of little size."""
    return base64.b64encode(zlib.compress(array("q", numbers).tobytes(), 9)).decode()


def unpacked(text: str) -> list[int]:
    """The numbers that :func:`packed` was given."""
    return list(array("q", zlib.decompress(base64.b64decode(text))))


def statistics() -> dict[str, int]:
    """torch's statistics of the device at the end of a scenario, in bytes or counts."""
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_requested": stats["requested_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "segments": stats["segment.all.allocated"],
        "retries": stats["num_alloc_retries"],
    }


def shown(origin: Any) -> str:
    """``file:line operator``, and autograd's node; no folders."""
    place = origin.source_line if origin is not None else None
    parts = [f"{Path(place[0]).name}:{place[1]}"] if place else []
    parts += [
        part for part in (getattr(origin, "operator_name", None), origin and origin.node) if part
    ]
    return " ".join(parts) or "unknown"


def recorded_events() -> Iterator[tuple[int, str]]:
    """Yield what torch recorded: signed requested bytes, and where from."""
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    for entry in trace:
        if entry["action"] in SIGNS:
            frames = entry.get("frames") or ()
            origin = RecordedOrigin(frames) if entry["action"] == "alloc" else None
            yield SIGNS[entry["action"]] * entry["size"], shown(origin) if origin else ""


def simulated_events(gpu: Any, began: int) -> Iterator[tuple[int, str]]:
    """Yield the same of a simulated device, from an event on."""
    for entry in gpu.trace[began:]:
        if entry.action in SIGNS:
            yield (
                SIGNS[entry.action] * entry.size,
                shown(entry.context) if entry.action == "alloc" else "",
            )


class Worker:
    """Makes scenarios, each on an empty device."""

    def __init__(self, kind: str, machine: str, release: str | None) -> None:
        self._kind = kind
        self._release = release
        self.model: GpuModel
        if kind == "real":
            self.model = CudaDevice(None).machine.model
        elif machine.startswith("{"):
            data = json.loads(machine)
            capability = tuple(data.pop("compute_capability"))
            self.model = GpuModel(compute_capability=capability, **data)
        else:
            self.model = find_gpu(machine)

    def hello(self) -> dict[str, Any]:
        """Return the environment that numbers depend on, without the name of the host."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            transformers = version("transformers")
        except PackageNotFoundError:
            transformers = None
        return {
            "machine": asdict(self.model),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if self._kind == "real" else None,
            "driver": CudaDevice(None).environment.driver if self._kind == "real" else None,
            "transformers": transformers,
        }

    def answer(self, scenario: Scenario) -> dict[str, Any]:
        """Make ``scenario``; what goes wrong is part of the answer."""
        start = time.perf_counter()
        try:
            found = self._make(scenario)
        except (Exception, SimulationError) as error:
            found = {"error": _short(error)}
            traceback.clear_frames(error.__traceback__)
            del error
        found["seconds"] = round(time.perf_counter() - start, 2)
        try:
            found["clean"] = self._clean()
        except RuntimeError:  # a failed assertion on the device: nothing works there any more
            found["clean"] = False
        return found

    def _make(self, scenario: Scenario) -> dict[str, Any]:
        if scenario.package == "transformers":
            # It imports torchaudio, which makes a tensor: on the GPU in torch.device("cuda").
            import_module("transformers.audio_utils")
        torch.manual_seed(0)
        device: AbstractContextManager[Any] = nullcontext()
        if self._kind != "real":
            release = self._release and ".".join(self._release.split(".")[:2])
            device = simulate(self.model, torch_version=release, alloc_conf=scenario.alloc_conf)
        with device as gpu:
            began = self._warm(scenario, gpu)
            if self._kind != "simulated":
                torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
            gc.disable()  # it would free cycles at moments of its own on each side
            try:
                alive = scenario.run()
                torch.cuda.synchronize()
                stats = statistics()
                direct = self._kind == "simulated"
                events = list(simulated_events(gpu, began) if direct else recorded_events())
                del alive
            finally:
                gc.enable()
                if self._kind != "simulated":
                    torch.cuda.memory._record_memory_history(None)
        texts = {text: number for number, text in enumerate(dict.fromkeys(t for _, t in events))}
        return {
            "statistics": stats,
            "events": packed(size for size, _ in events),
            "origins": list(texts),
            "origin_of": packed(texts[text] for _, text in events),
        }

    def _warm(self, scenario: Scenario, gpu: Any) -> int:
        """Run ``scenario`` once if it is to be; return how many simulated events there were."""
        if not scenario.is_warmed:
            return 0
        scenario.run()
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        return len(gpu.trace) if self._kind == "simulated" else 0

    def _clean(self) -> bool:
        """Empty the device; return whether it is as a fresh process finds it."""
        gc.collect()
        if self._kind != "real":
            return True
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0


def _short(error: BaseException) -> str:
    """The error's class and first line, without folders."""
    first = (str(error).splitlines() or [""])[0]
    first = re.sub(r"(?:/[^\s/:'\"]+)+/", "", first)
    return f"{type(error).__name__}: {first}"[:300]


def main() -> None:
    """Answer until there is no more line."""
    kind, machine, release = [*sys.argv[1:], "", ""][:3]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what programs print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        worker = Worker(kind, machine, release or None)
    except (Exception, SimulationError) as error:
        say({"error": _short(error)})
        return
    known = scenarios()
    say(worker.hello())
    for line in sys.stdin:
        say(worker.answer(known[line.rstrip("\n")]))


if __name__ == "__main__":
    main()
