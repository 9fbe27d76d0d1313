"""What a test will take of a device, as far as anybody knows before it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Need:
    """What a test asks for."""

    bytes: int | None
    """Of its device, what its fixtures hold with it; ``None``: nobody knows, so it runs alone."""
    source: str
    """Who says so: ``max``, ``max_reserved``, ``baseline``, ``earlier run``, ``prediction`` or
    ``nobody``."""
    duration: float | None = None
    """Seconds; ``None`` where nobody knows."""
    exclusive: bool = False
    """Nothing else may run on its device."""
    priority: int = 0
    guaranteed: bool = True
    """``False`` for an opportunistic test: it goes last."""
    calm: float = 0.0
    """Seconds for which strangers have to leave it its room before it comes in."""

    def on(self, capacity: int) -> int:
        """Bytes that nobody else may have while it runs on a device of ``capacity`` bytes."""
        return capacity if self.exclusive or self.bytes is None else self.bytes

    def alone(self, least: int, calm: float) -> Need:
        """The same with the device to itself, and ``least`` bytes of it for ``calm`` seconds."""
        return replace(self, bytes=max(self.bytes or 0, least), exclusive=True, calm=calm)

    def as_guaranteed(self) -> Need:
        """The same for a test that makes no more room for others."""
        return replace(self, guaranteed=True)

    def larger(self, size: int) -> Need:
        """The same with ``size`` bytes at the least."""
        return self if self.bytes is None else replace(self, bytes=max(self.bytes, size))


NO_MEMORY = Need(0, "no marker")
"""Of a test that does not ask for GPU memory."""
