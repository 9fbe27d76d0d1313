"""An event-exact model of PyTorch's CUDA caching allocator: no torch, no GPU, usable by itself.

May use: nothing of the other layers.
"""

from pytest_gpumem.allocator.allocator import Allocator
from pytest_gpumem.allocator.messages import AllocatorError, OutOfMemory, OutOfMemoryFields
from pytest_gpumem.allocator.recording import SnapshotError, load_snapshot
from pytest_gpumem.allocator.replay import replay
from pytest_gpumem.allocator.replayed import ReplayResult
from pytest_gpumem.allocator.settings import AllocatorSettings, SettingsError
from pytest_gpumem.allocator.trace import Trace, TraceEntry

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
