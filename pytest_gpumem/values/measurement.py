"""The results of measuring: frozen values that every other package reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pytest_gpumem.values.serialization import KEY, OMITTED, Plain

SETUP = "setup"
"""The phase in which a test's fixtures are set up."""

CALL = "call"
"""The phase of a test's body as a whole; every other phase lies inside it."""


@dataclass(frozen=True)
class PhaseRecord(Plain):
    """A named window of a test; all numbers in bytes, charged to the test.

    A phase entered several times is one record: peaks are the highest of all entries,
    ``allocated_before`` belongs to the first and ``allocated_after`` to the last.
    """

    name: str = field(metadata=KEY)
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
    """The blocks live at the peak, by source line and operator, most bytes first."""


@dataclass(frozen=True)
class Measurement(Plain):
    """The effect of one test on the memory of one device; all numbers in bytes.

    ``peak_allocated``, ``allocated_before`` and ``allocated_after`` are charged bytes: those that
    the test's own fixtures hold and its body allocates. ``stray`` are bytes allocated before
    the test that belong to none of its fixtures; they have been subtracted.
    """

    device: str
    """The device's name in torch, such as ``cuda:0``."""
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
    expected: Mapping[str, int] = field(default_factory=dict)
    """The bytes of objects given to ``gpumem.watch``, by closed forms and category."""
    sites: tuple[Mapping[str, Any], ...] = ()
    """The blocks live at the peak, by source line and operator, most bytes first."""
    leaks: tuple[Mapping[str, Any], ...] = ()
    """The leaked blocks, by source line and operator."""
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the numbers needs, e.g. on placeholders that were read."""
    timeline: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    """The allocated bytes over time, where a report shows them; see ``attribution.timeline``."""
    dry: bool = field(default=False, metadata=OMITTED)
    """Whether torch's own CUDA code ran without a GPU."""
    facts: Mapping[str, Any] = field(default_factory=dict, metadata=OMITTED)
    """The events of the body that memory depends on; see ``measurement.facts``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))
        object.__setattr__(self, "composition", MappingProxyType(dict(self.composition)))
