"""What is asked of the process that runs a script, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.script.entry import Script
from pytest_gpumem.values.measurement import Measurement

MEASURED = "cuda"
"""In the place of a model to be simulated: the CUDA device that there is."""
DRY = "dry:"
"""How the name of a machine begins that is the dry device."""

STOPPED = "stopped"
"""After as many steps as were asked for."""
TIME = "time"
"""Its time was over."""
ENDED = "ended"
"""It ran to its end."""
EXITED = "exited"
"""It ended itself with an exit code that is not 0."""
OUT_OF_MEMORY = "out of memory"
RAISED = "raised"
"""Anything else."""
UNKNOWN = "unknown value"
"""It asked for a value that a simulated device does not have."""
REFUSED = "refused"
"""A simulated device cannot do what it asked for."""
NOT_RUN = "not run"
"""There was nothing to run."""
INTERRUPTED = "interrupted"
"""By Ctrl-C."""


@dataclass(frozen=True)
class Request:
    """One run; ``gpu`` is a machine of the catalogue or :data:`MEASURED`."""

    script: Script
    gpu: str
    steps: int
    seconds: float
    answer: Path
    unbounded: bool = False
    """Whether the simulated device has as much memory as anybody wants."""
    again: str = ""
    """Why the CPU computes what is simulated; empty where it does not."""

    def write(self, path: Path) -> None:
        """Write it for :meth:`read`."""
        data = {**vars(self), "script": asdict(self.script), "answer": str(self.answer)}
        path.write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read what :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        script = data["script"]
        script["arguments"] = tuple(script["arguments"])
        return cls(**{**data, "script": Script(**script), "answer": Path(data["answer"])})


@dataclass(frozen=True)
class Answer:
    """What came of one run; sizes in bytes."""

    ending: str
    """One of the constants above."""
    sentence: str = ""
    """What it raised or was refused for."""
    steps: int = 0
    seconds: float = 0.0
    gpu: str = ""
    total_memory: int = 0
    torch: str = ""
    measurements: tuple[Measurement, ...] = ()
    """Of the device that was asked for, then of others that were used."""
    out_of_memory: Mapping[str, Any] | None = None
    """Why the last allocation that failed did so."""
    post_mortem: tuple[str, ...] = ()
    """The same in lines."""
    kernel: str = ""
    """The kernel that nobody described, where it was refused for that."""
    snippet: str = ""
    """What describes it."""
    made_up: bool = False
    """Whether it went by a value that nobody computed."""
    work: float = 0.0
    """Seconds that computing its values takes at the least."""

    @property
    def wants_values(self) -> bool:
        """Whether another run, with real values, may come further."""
        failed = self.ending in (RAISED, EXITED) and self.made_up
        return self.ending == UNKNOWN or failed

    def write(self, path: Path) -> None:
        """Write it for :meth:`read`."""
        measurements = [one.to_dict() for one in self.measurements]
        path.write_text(json.dumps({**vars(self), "measurements": measurements}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read what :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        measurements = tuple(map(Measurement.from_dict, data["measurements"]))
        lines = tuple(data["post_mortem"])
        return cls(**{**data, "measurements": measurements, "post_mortem": lines})
