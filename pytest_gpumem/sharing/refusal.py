"""The cause of a refused allocation: the test, another process or the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pytest_gpumem.sizes import format_size


@dataclass(frozen=True)
class Refusal:
    """An allocation that failed after the allocator had tried everything; bytes."""

    asked: int
    """Bytes requested from the driver: the segment that the allocation needed."""
    reserved: int
    """Bytes that the process had reserved then."""
    free: int
    """Bytes that the driver had left."""
    total: int
    context: int = 0
    """Bytes that the process holds of the device outside its allocator."""

    @property
    def wanted(self) -> int:
        """The bytes that the process would have reserved with it."""
        return self.reserved + self.asked

    @property
    def of_others(self) -> int:
        """The bytes that other processes held."""
        return max(self.total - self.free - self.reserved - self.context, 0)


class Cause(Enum):
    """The cause of a refused allocation."""

    QUOTA = "quota"
    """The test wanted more than its quota."""
    NEIGHBOUR = "neighbour"
    """Other processes: on an otherwise empty device the allocation would have succeeded."""
    DEVICE = "device"
    """The test wanted more than the device has."""


def cause_of(refusal: Refusal, quota: int | None) -> Cause:
    """Return the cause of ``refusal`` for a process that may reserve ``quota`` bytes."""
    if quota is not None and refusal.wanted > quota:
        return Cause.QUOTA
    if refusal.asked <= refusal.free + refusal.of_others:
        return Cause.NEIGHBOUR
    return Cause.DEVICE


def sentence(refusal: Refusal, quota: int | None) -> str:
    """Return the refusal as a sentence for the user."""
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
