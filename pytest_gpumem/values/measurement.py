"""What was measured: the frozen values every other room reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

SETUP = "setup"
"""The phase in which a test's fixtures are set up."""

CALL = "call"
"""The phase of a test's body as a whole; every other phase lies inside it."""


@dataclass(frozen=True)
class PhaseRecord:
    """One named window of a test; all numbers in bytes, charged to the test.

    A phase entered several times is one record: peaks are the highest of all entries,
    ``allocated_before`` belongs to the first and ``allocated_after`` to the last.
    """

    name: str
    peak_allocated: int
    peak_reserved: int
    allocated_before: int
    allocated_after: int
    cublas_workspace: int = 0
    """Bytes of cuBLAS and cuBLASLt workspaces that were live when the phase ended."""
    entered: int = 1
    parent: str | None = None
    """The enclosing phase, ``None`` for an outermost one."""
    composition: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category at the peak; empty where nothing was recorded."""
    sites: tuple[Mapping[str, Any], ...] = ()
    """What was live at the peak, by source line and operator, most bytes first."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the name."""
        data = {key: value for key, value in vars(self).items() if key != "name"}
        sites = [dict(site) for site in self.sites]
        return {**data, "composition": dict(self.composition), "sites": sites}

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> PhaseRecord:
        """Rebuild what :meth:`to_dict` wrote."""
        return cls(name=name, **{**data, "sites": tuple(data.get("sites", ()))})


@dataclass(frozen=True)
class Measurement:
    """What one test did to the memory of one device; all numbers in bytes.

    ``peak_allocated``, ``allocated_before`` and ``allocated_after`` are charged bytes: what the
    test's own fixtures hold and what its body allocates. ``stray`` is what was allocated before
    the test and belongs to none of its fixtures; it has been subtracted.
    """

    device: str
    """As torch names it, ``cuda:0``."""
    simulated: bool
    peak_allocated: int
    peak_reserved: int
    allocated_before: int
    allocated_after: int
    leaked: int | None
    """Bytes left behind after gc with workspaces cleared; ``None`` when the body failed."""
    cublas_workspace: int
    stray: int = 0
    phases: Mapping[str, PhaseRecord] = field(default_factory=dict)
    composition: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category at the peak; empty where nothing was recorded."""
    sites: tuple[Mapping[str, Any], ...] = ()
    """What was live at the peak, by source line and operator, most bytes first."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """By closed forms, what ``gpumem.watch`` was told of holds: bytes by category."""
    leaks: tuple[Mapping[str, Any], ...] = ()
    """What was left behind, by source line and operator."""
    notes: tuple[str, ...] = ()
    """Sentences a reader of the numbers has to know, e.g. neutral values that were read."""
    timeline: Mapping[str, Any] | None = None
    """What was allocated over time, where a report shows it; see ``attribution.timeline``."""
    dry: bool = False
    """Whether torch's own CUDA code ran without a GPU."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the body did that memory depends on; see ``measurement.facts``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))
        object.__setattr__(self, "composition", MappingProxyType(dict(self.composition)))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only, so that it travels between pytest-xdist processes."""
        return {
            "device": self.device,
            "simulated": self.simulated,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "allocated_before": self.allocated_before,
            "allocated_after": self.allocated_after,
            "leaked": self.leaked,
            "cublas_workspace": self.cublas_workspace,
            "stray": self.stray,
            "phases": {name: phase.to_dict() for name, phase in self.phases.items()},
            "composition": dict(self.composition),
            "expected": dict(self.expected),
            "sites": [dict(site) for site in self.sites],
            "leaks": [dict(site) for site in self.leaks],
            "notes": list(self.notes),
            **({} if self.timeline is None else {"timeline": dict(self.timeline)}),
            **({"dry": True} if self.dry else {}),
            **({"facts": dict(self.facts)} if self.facts else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Rebuild what :meth:`to_dict` wrote."""
        values = dict(data)
        values["phases"] = {
            name: PhaseRecord.from_dict(name, phase) for name, phase in data["phases"].items()
        }
        for key in ("sites", "leaks"):
            values[key] = tuple(data.get(key, ()))
        values["notes"] = tuple(data["notes"])
        return cls(**values)
