"""The request to the process that runs a script, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.device import Computed
from pytest_gpumem.script.entry import Script
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.plain import Plain

MEASURED = "cuda"
"""The name of the real CUDA device, in place of a model to simulate."""
DRY = "dry:"
"""The prefix of a machine's name that selects the dry device."""

STOPPED = "stopped"
"""The ending after the requested number of steps."""
TIME = "time"
ENDED = "ended"
"""The ending of a script that ran to its last line."""
EXITED = "exited"
"""The ending with an exit code other than 0."""
OUT_OF_MEMORY = "out of memory"
RAISED = "raised"
UNKNOWN = "unknown value"
"""The ending of a script that read a value which a simulated device does not have."""
REFUSED = "refused"
"""The ending of a script that used something a simulated device cannot do."""
NOT_RUN = "not run"
INTERRUPTED = "interrupted"


LOAD = "load"
"""The phase before a script's first forward."""
ITERATION = "iteration"
"""The phase of an iteration, numbered as its parts: ``iteration_1``, ``forward_1``."""


def iteration_of(name: str) -> int | None:
    """Return the iteration that the phase ``name`` belongs to, ``None`` for none."""
    part, _, number = name.rpartition("_")
    return int(number) if part and number.isdecimal() else None


@dataclass(frozen=True)
class Request(Plain):
    """The request for one run; ``gpu`` is a machine of the catalogue or :data:`MEASURED`."""

    script: Script
    gpu: str
    steps: int
    seconds: float
    answer: Path
    unbounded: bool = False
    computed: Computed = Computed.AT_FIRST
    """The values that the CPU computes."""
    again: str = ""
    """The reason why it computes more than at first; empty where it does not."""


@dataclass(frozen=True)
class Answer(Plain):
    """The result of one run; sizes in bytes."""

    ending: str
    sentence: str = ""
    """The message of its exception, or the reason of its refusal."""
    steps: int = 0
    seconds: float = 0.0
    gpu: str = ""
    total_memory: int = 0
    torch: str = ""
    measurements: tuple[Measurement, ...] = ()
    """The measurements of the requested device first, then of others that were used."""
    out_of_memory: Mapping[str, Any] | None = None
    """The reason why the last allocation that failed did so."""
    post_mortem: tuple[str, ...] = ()
    made_up: bool = False
    """Whether the run used a value that was not computed."""
    further: Computed | None = None
    """The values with which another run may get further; ``None`` for none."""
    work: float = 0.0
    """The least seconds that computing all values takes."""

    def next_values(self, seconds: float) -> Computed | None:
        """Return the values of another run that takes at most ``seconds``; ``None`` for none."""
        takes_too_long = self.further is Computed.ALL and self.work > seconds
        return None if takes_too_long else self.further
