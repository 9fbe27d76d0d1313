"""The allocator's facts that differ between releases of PyTorch, each with its source.

A constant is the first release with that behaviour, unless its text says otherwise. Its source is
c10/cuda/CUDACachingAllocator.cpp at the tag, if no other file is named.
"""

from __future__ import annotations

from typing import Final

Version = tuple[int, int]

OLDEST: Final[Version] = (2, 6)
NEWEST: Final[Version] = (2, 15)
"""The releases whose rules are implemented."""

# Settings: c10/core/AllocatorConfig.cpp.
GENERIC_CONFIG: Final[Version] = (2, 10)
"""The device-independent class reads the string; its errors are a ValueError in Python."""
LARGE_SEGMENT_FIRST: Final[Version] = (2, 11)
"""``large_segment_size_mb`` is read before all other keys."""

# The steps of an allocation.
PEER_POOLS: Final[Version] = (2, 8)
"""Pools lend their free blocks (``use_on_oom``): as the last step until :data:`LENDS_FIRST`."""
LENDS_FIRST: Final[Version] = (2, 11)
"""Pools lend their free blocks as the first step (``try_mempool_fallback``)."""
LAST_SCOPE_FIRST: Final[Version] = (2, 10)
"""The pool scope opened last decides; before, the first one did (``captures_underway``)."""
CAPTURE_OF_STREAM: Final[Version] = (2, 13)
"""Only a capture of the current stream forbids events; before, any open scope does."""
REUSE_IN_CAPTURE: Final[Version] = (2, 15)
"""The end of a capture ends ``graph_capture_record_stream_reuse`` for its pool."""
NUMBERED_BLOCKS: Final[Version] = (2, 12)
"""In this release alone, free blocks of equal size are used in the order in which their ``Block``
objects were created (``BlockComparatorRegistrationCounter``)."""
OLD_SEGMENTS_FIRST: Final[Version] = (2, 13)
"""Free blocks of equal size are used in the order in which their segments were allocated
(``BlockComparatorSizeCounterAddress``)."""

# The memory fraction: setMemoryFraction.
WHOLE_DEVICE_UNLIMITED: Final[Version] = (2, 10)
"""A fraction of 1 removes the limit."""
FRACTION_ROUNDED: Final[Version] = (2, 13)
"""The limit is rounded to the nearest byte; before, down."""

# The text of an OutOfMemoryError.
HINT_NAMES_ALLOC_CONF: Final[Version] = (2, 10)
"""Only this release's advice names ``PYTORCH_ALLOC_CONF``, and it is the last with the old page."""
NO_HINT_IF_EXPANDABLE: Final[Version] = (2, 14)
"""No advice is given where segments are expandable."""

# Statistics and snapshots: torch/csrc/cuda/Module.cpp and memory_snapshot.cpp.
OOM_REJECTIONS: Final[Version] = (2, 12)
"""``num_oom_rejections``."""
BYTES_BY_POOL: Final[Version] = (2, 13)
"""``reserved_bytes_by_private_pools``, and settings of pinned memory."""
COMPILE_CONTEXT: Final[Version] = (2, 8)
REUSE_SETTING: Final[Version] = (2, 9)
"""``graph_capture_record_stream_reuse``."""
USER_METADATA: Final[Version] = (2, 10)
POOL_OF_EVENT: Final[Version] = (2, 12)
"""``pool_id``."""
HOST_MEMORY: Final[Version] = (2, 14)
"""``host_segments`` and ``host_traces``."""
