"""The device on which a worker's tests run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpumem.sharing.need import Need


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
