"""The memory that tests will take of a device, as far as it is known before they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Need:
    """The memory, duration and priority that a test requests."""

    bytes: int | None
    """Bytes on its device, fixtures included; ``None`` if unknown: then it runs alone."""
    source: str
    """The origin of the number: ``max``, ``max_reserved``, ``baseline``, ``earlier run``,
    ``prediction`` or ``unknown``."""
    duration: float | None = None
    """Seconds; ``None`` if unknown."""
    exclusive: bool = False
    """Whether nothing else may run on its device."""
    priority: int = 0
    guaranteed: bool = True
    """``False`` for an opportunistic test: it goes last."""
    calm: float = 0.0
    """Seconds for which other processes have to leave its bytes free before it is admitted; not 0
    where it was crowded out and runs alone."""

    def on(self, capacity: int) -> int:
        """Return the bytes reserved for it while it runs on a device of ``capacity`` bytes."""
        return capacity if self.exclusive or self.bytes is None else self.bytes


NO_MEMORY = Need(0, "no marker")
"""The need of a test that does not ask for GPU memory."""


@dataclass(frozen=True)
class Place:
    """A device that workers share; places of one ``name`` take from the same memory."""

    name: str
    capacity: int
    """Bytes that tests may have, all together."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """Needs of the tests that use the device, by id."""
    real: bool = False
    """Whether it is a real GPU rather than a simulated one."""


NOWHERE = Place("", 0)
"""The place of a worker without tests that use a device."""
