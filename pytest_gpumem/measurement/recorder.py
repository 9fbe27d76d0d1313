"""The interface of a device's record of its blocks, for real and simulated devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pytest_gpumem.attribution.history import Event, Origin

Segments = Sequence[Mapping[str, Any]]
"""Segments in the form of ``torch.cuda.memory_snapshot()``."""


class Recorder(Protocol):
    """The recorded events of every device."""

    def positions(self) -> Sequence[int]:
        """Return the number of events, by device."""

    def held(self, device: int) -> Iterable[tuple[int, int, Origin | None]]:
        """Return address, bytes and origin of every live block."""

    def events(self, device: int, begin: int) -> Iterable[Event]:
        """Yield the events from position ``begin`` on, one for each position."""

    def reserved(self, device: int, begin: int) -> Sequence[int]:
        """Return the bytes held from the driver at position ``begin``, and after each event."""

    def segments(self, device: int) -> Segments:
        """Return the segments held from the driver now; none where splits are not known."""

    def splits(self, device: int, begin: int, segments: Segments) -> Sequence[int]:
        """Return the bytes of free parts of segments in use, as :meth:`reserved` does.

        ``segments`` are those at position ``begin``. Empty where the bytes are not known.
        """

    def last_failure(self, device: int) -> tuple[int, Origin | None] | None:
        """Return the position and the origin of the last allocation that found no memory."""
