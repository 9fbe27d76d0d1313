"""What a program or a test takes on a device that is not there: values, read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.values.measurement import Measurement


@dataclass(frozen=True)
class Prediction:
    """What a program needs on one model of GPU; sizes in bytes."""

    gpu: str
    total_memory: int
    fits: bool
    """Whether it ran to its end in that memory, the CUDA context not counted."""
    peak_allocated: int
    """Where it does not fit: with as much memory as it wants."""
    peak_reserved: int
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak allocated by phase."""
    notes: tuple[str, ...] = ()
    ranks: str = ""
    """Which rank of how many it is, ``rank 0 of 8``; empty for a process of its own."""
    code: str = ""
    """``eager`` or ``compiled``, where both are predicted."""
    sites: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Bytes by source line at the peak of each phase, and under an empty name at the peak of all,
    in the JSON form of :class:`~pytest_gpumem.attribution.composition.Site`; where both are."""

    @property
    def left(self) -> int:
        """Bytes of the device that are never reserved; negative where they are missing."""
        return self.total_memory - self.peak_reserved

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        data = {**vars(self), "left": self.left, "phases": dict(self.phases)}
        if not self.ranks:
            del data["ranks"]
        if self.code:
            data["sites"] = [dict(site) for site in self.sites[""]]
        else:
            del data["code"], data["sites"]
        return {**data, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """Read what :meth:`to_dict` gave of a process of its own, in neither code nor ranks."""
        known = {name: value for name, value in data.items() if name != "left"}
        return cls(**{**known, "notes": tuple(data["notes"])})


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
