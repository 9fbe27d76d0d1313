"""Why an allocation was refused: whose fault it is that memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pytest_gpumem.sizes import format_size


@dataclass(frozen=True)
class Refusal:
    """One allocation that failed when the allocator had tried everything; bytes."""

    asked: int
    """Of the driver: the segment that the allocation needed."""
    reserved: int
    """What the process had of the device then."""
    free: int
    """What the driver had left."""
    total: int
    context: int = 0
    """What the process holds of the device outside its allocator."""

    @property
    def wanted(self) -> int:
        """What the process would have reserved with it."""
        return self.reserved + self.asked

    @property
    def of_others(self) -> int:
        """What other processes held."""
        return max(self.total - self.free - self.reserved - self.context, 0)


class Cause(Enum):
    """Whose fault it is."""

    QUOTA = "quota"
    """The test's: it wanted more than its quota."""
    NEIGHBOUR = "neighbour"
    """Another process's: alone on the device the allocation would have succeeded."""
    DEVICE = "device"
    """The test's: it wanted more than the device has."""


def cause_of(refusal: Refusal, quota: int | None) -> Cause:
    """Return whose fault ``refusal`` is, of a process that may reserve ``quota`` bytes."""
    if quota is not None and refusal.wanted > quota:
        return Cause.QUOTA
    if refusal.asked <= refusal.free + refusal.of_others:
        return Cause.NEIGHBOUR
    return Cause.DEVICE


def sentence(refusal: Refusal, quota: int | None) -> str:
    """Return what a person reads of it."""
    asked, reserved = format_size(refusal.asked), format_size(refusal.reserved)
    cause = cause_of(refusal, quota)
    if cause is Cause.QUOTA:
        assert quota is not None
        return (
            f"over its quota: {asked} asked for with {reserved} reserved is "
            f"{format_size(refusal.wanted - quota)} over the quota of {format_size(quota)}"
        )
    if cause is Cause.DEVICE:
        return (
            f"over the device: {asked} asked for with {reserved} reserved, and the device has "
            f"{format_size(refusal.total - refusal.context)} for this process"
        )
    return (
        f"crowded out: {asked} asked for with {reserved} reserved, and other processes held "
        f"{format_size(refusal.of_others)} of the device"
    )
