"""The prediction that a measured test is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.measurement.record import Measurement


@dataclass(frozen=True)
class PredictedTest:
    """What a test took on the simulated device of the same model as the real one."""

    gpu: str
    measurement: Measurement | None
    problem: str = ""
    """Why there is none; one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; sizes in bytes."""
        found = self.measurement
        if found is None:
            return {"gpu": self.gpu, "problem": self.problem}
        return {
            "gpu": self.gpu,
            "peak_allocated": found.peak_allocated,
            "peak_reserved": found.peak_reserved,
            "composition": dict(found.composition),
            "phases": {
                name: {
                    "peak_allocated": phase.peak_allocated,
                    "composition": dict(phase.composition),
                }
                for name, phase in found.phases.items()
            },
            "notes": list(found.notes),
        }
