"""What a device remembers of its blocks; real and simulated ones answer alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pytest_gpumem.attribution.history import Event, Origin

Segments = Sequence[Mapping[str, Any]]
"""As in ``torch.cuda.memory_snapshot()``."""


class Recorder(Protocol):
    """The events of every device, for as long as they are recorded."""

    def positions(self) -> Sequence[int]:
        """Return by device how many events there have been."""

    def held(self, device: int) -> Iterable[tuple[int, int, Origin | None]]:
        """Return address, bytes and origin of every live block."""

    def events(self, device: int, begin: int) -> Iterable[Event]:
        """Return what happened from position ``begin`` on, one event for each position."""

    def reserved(self, device: int, begin: int) -> Sequence[int]:
        """Return the bytes held from the driver at position ``begin``, and after each event."""

    def segments(self, device: int) -> Segments:
        """Return what is held from the driver now; nothing where splits are not known."""

    def splits(self, device: int, begin: int, segments: Segments) -> Sequence[int]:
        """Return the bytes of free parts of segments in use, as :meth:`reserved` does.

        ``segments`` are those at position ``begin``. Nothing is returned where it is not known.
        """

    def last_failure(self, device: int) -> tuple[int, Origin | None] | None:
        """Return the position and the origin of the last allocation that found no memory."""
