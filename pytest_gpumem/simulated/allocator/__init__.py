"""An event-exact model of PyTorch's CUDA caching allocator: no torch, no GPU, usable by itself.

May use: nothing of the other layers.
"""

from pytest_gpumem.simulated.allocator.allocator import Allocator
from pytest_gpumem.simulated.allocator.messages import (
    AllocatorError,
    OutOfMemory,
    OutOfMemoryFields,
)
from pytest_gpumem.simulated.allocator.recording import SnapshotError, load_snapshot
from pytest_gpumem.simulated.allocator.replay import replay
from pytest_gpumem.simulated.allocator.replayed import ReplayResult
from pytest_gpumem.simulated.allocator.settings import AllocatorSettings, SettingsError
from pytest_gpumem.simulated.allocator.trace import Trace, TraceEntry

__all__ = [
    "Allocator",
    "AllocatorError",
    "AllocatorSettings",
    "OutOfMemory",
    "OutOfMemoryFields",
    "ReplayResult",
    "SettingsError",
    "SnapshotError",
    "Trace",
    "TraceEntry",
    "load_snapshot",
    "replay",
]
