"""Predicted memory of a program or a test on an absent device: values, read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import listed
from pytest_gpumem.values.measurement import CALL, SETUP, Measurement
from pytest_gpumem.values.serialization import OMITTED, Plain


@dataclass(frozen=True)
class Prediction(Plain):
    """The memory that a program needs on one model of GPU; sizes in bytes."""

    gpu: str
    total_memory: int
    fits: bool
    """Whether it ran to its end in the device's memory, not counting the CUDA context."""
    peak_allocated: int
    """The peak; where the program does not fit, that of a run with unlimited memory."""
    peak_reserved: int
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak allocated by phase."""
    notes: tuple[str, ...] = ()
    ranks: str = field(default="", metadata=OMITTED)
    """The rank and the number of ranks, as ``rank 0 of 8``; empty for a single process."""
    code: str = field(default="", metadata=OMITTED)
    """``eager`` or ``compiled``, where both are predicted."""
    sites: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Bytes by source line at the peak of each phase, and of the whole run under an empty name, in
    the JSON form of :class:`~pytest_gpumem.attribution.composition.Site`; only with ``code``."""

    @classmethod
    def of(
        cls,
        devices: Sequence[Measurement],
        gpu: str,
        total_memory: int,
        *,
        fits: bool,
        code: str = "",
    ) -> Prediction:
        """Return the prediction that measurements of the ``devices`` of a ``gpu`` give.

        Of several devices it is that of the highest peak, and a note names the others. ``code``
        adds sites.
        """
        measured = max(devices, key=lambda one: one.peak_allocated)
        others = [one for one in devices if one is not measured and one.peak_allocated]
        notes = measured.notes
        if others:
            peaks = [f"{one.device} peaks at {format_size(one.peak_allocated)}" for one in others]
            numbers = f"{gpu}: these are numbers of {measured.device}; {listed(peaks)}"
            notes = (numbers, *notes)
        sites = {name: phase.sites for name, phase in measured.phases.items()}
        return cls(
            gpu,
            total_memory,
            fits,
            measured.peak_allocated,
            measured.peak_reserved,
            {
                name: phase.peak_allocated
                for name, phase in measured.phases.items()
                if name not in (SETUP, CALL)
            },
            notes,
            code=code,
            sites={**sites, "": measured.sites} if code else {},
        )

    @property
    def left(self) -> int:
        """The bytes of the device that are never reserved; negative where they are missing."""
        return self.total_memory - self.peak_reserved

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        data = super().to_dict()
        del data["sites"]
        sites = {"sites": [dict(site) for site in self.sites[""]]} if self.code else {}
        return {**data, **sites, "left": self.left}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """Rebuild a prediction from :meth:`to_dict`'s result, without code or ranks."""
        return super().from_dict({name: data[name] for name in data if name != "left"})


@dataclass(frozen=True)
class PredictedTest:
    """The memory that a test used on a simulated device of the real device's model."""

    gpu: str
    measurement: Measurement | None
    problem: str = ""
    """The reason why there is no measurement; one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; sizes in bytes."""
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
