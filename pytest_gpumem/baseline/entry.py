"""The stored form of one test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import compact
from pytest_gpumem.simulated.common.compiled_notes import ran_eagerly
from pytest_gpumem.values.measurement import CALL, Measurement, PhaseRecord


@dataclass(frozen=True)
class StoredPeak:
    """The live blocks at a peak: bytes by category, and the largest sites."""

    composition: Mapping[str, int]
    sites: tuple[Site, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; unknown fields of a site are left out."""
        return {
            "composition": dict(self.composition),
            "sites": [
                {key: value for key, value in site.to_dict().items() if value is not None}
                for site in self.sites
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredPeak | None:
        """Rebuild what :meth:`to_dict` wrote, ``None`` where nothing was recorded."""
        if "sites" not in data:
            return None
        sites = tuple(Site.from_dict(site) for site in data["sites"])
        return cls(data.get("composition", {}), sites)

    @classmethod
    def of(cls, measured: Measurement | PhaseRecord) -> StoredPeak | None:
        """Return the stored form of a peak, ``None`` where nothing was recorded."""
        if not measured.sites:
            return None
        sites = [Site.from_dict(site) for site in measured.sites]
        # The bytes of one block follow from its shape.
        compacted = (replace(site, each=None) for site in compact(sites))
        return cls(dict(measured.composition), tuple(compacted))

    @property
    def without_lines(self) -> StoredPeak:
        """A copy without the source lines of its sites."""
        return replace(self, sites=tuple(replace(site, site=None) for site in self.sites))


@dataclass(frozen=True)
class BaselineEntry:
    """The stored numbers of one test; all in bytes, charged to the test."""

    peak_allocated: int
    peak_reserved: int
    allocated_after: int
    cublas_workspace: int
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak allocated by phase name."""
    peak: StoredPeak | None = None
    """The live blocks at the test's peak; ``None`` where not recorded."""
    phase_peaks: Mapping[str, StoredPeak] = field(default_factory=dict)
    """The live blocks by phase, where these are not those of the whole test."""
    tolerance: str | None = None
    """The test's own tolerance, in the marker's form; ``None`` where it states none."""
    ran_eagerly: bool = False
    """Whether code that was to be compiled ran eagerly on the simulated GPU."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the test on which memory depends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))
        object.__setattr__(self, "phase_peaks", MappingProxyType(dict(self.phase_peaks)))

    @classmethod
    def of(cls, measurement: Measurement, tolerance: str | None = None) -> BaselineEntry:
        """Return the entry of ``measurement``, of a test that may have its own ``tolerance``."""
        # CALL would repeat the whole test's numbers.
        phases = {name: p for name, p in measurement.phases.items() if name != CALL}
        peak = StoredPeak.of(measurement)
        peaks = {name: StoredPeak.of(phase) for name, phase in phases.items()}
        return cls(
            peak_allocated=measurement.peak_allocated,
            peak_reserved=measurement.peak_reserved,
            allocated_after=measurement.allocated_after,
            cublas_workspace=measurement.cublas_workspace,
            phases={name: phase.peak_allocated for name, phase in phases.items()},
            peak=peak,
            phase_peaks={name: p for name, p in peaks.items() if p is not None and p != peak},
            tolerance=tolerance,
            ran_eagerly=any(map(ran_eagerly, measurement.notes)),
            facts=measurement.facts,
        )

    def peak_of(self, phase: str | None) -> StoredPeak | None:
        """Return the live blocks at the peak of ``phase``, or of the whole test for ``None``."""
        if phase is None or phase in self.phase_peaks:
            return self.peak if phase is None else self.phase_peaks[phase]
        same = self.peak is not None and self.phases.get(phase) == self.peak_allocated
        return self.peak if same else None

    @property
    def without_lines(self) -> BaselineEntry:
        """A copy without source lines: moved code needs no new baseline."""
        if self.peak is None and not self.phase_peaks:
            return self
        return replace(
            self,
            peak=self.peak and self.peak.without_lines,
            phase_peaks={name: peak.without_lines for name, peak in self.phase_peaks.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the form of schema.json; composition and sites only where they were recorded."""
        return {
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "allocated_after": self.allocated_after,
            "cublas_workspace": self.cublas_workspace,
            **({} if self.tolerance is None else {"tolerance": self.tolerance}),
            **({"ran_eagerly": True} if self.ran_eagerly else {}),
            **({"facts": dict(self.facts)} if self.facts else {}),
            "phases": {
                name: {"peak_allocated": peak, **_peak_dict(self.phase_peaks.get(name))}
                for name, peak in self.phases.items()
            },
            **_peak_dict(self.peak),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """Rebuild what :meth:`to_dict` wrote."""
        numbers = ("peak_allocated", "peak_reserved", "allocated_after", "cublas_workspace")
        peaks = {name: StoredPeak.from_dict(phase) for name, phase in data["phases"].items()}
        return cls(
            **{name: data[name] for name in numbers},
            phases={name: phase["peak_allocated"] for name, phase in data["phases"].items()},
            peak=StoredPeak.from_dict(data),
            phase_peaks={name: peak for name, peak in peaks.items() if peak is not None},
            tolerance=data.get("tolerance"),
            ran_eagerly=data.get("ran_eagerly", False),
            facts=data.get("facts", {}),
        )


def _peak_dict(peak: StoredPeak | None) -> dict[str, Any]:
    return {} if peak is None else peak.to_dict()
