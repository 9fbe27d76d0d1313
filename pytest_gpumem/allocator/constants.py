"""Constants of PyTorch's CUDA caching allocator, in bytes; the same in torch 2.6 to 2.15.

From c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import Final

MIN_BLOCK: Final = 512
"""kMinBlockSize: every block is a multiple of this."""
SMALL_SIZE: Final = 1 << 20
"""kSmallSize: the largest rounded request that the small pool serves."""
SMALL_SEGMENT: Final = 2 << 20
"""kSmallBuffer: size of a small-pool segment."""
LARGE_SEGMENT: Final = 20 << 20
"""kLargeBuffer: segment for requests below MIN_LARGE_ALLOC; `large_segment_size_mb` since 2.11."""
MIN_LARGE_ALLOC: Final = 10 << 20
"""kMinLargeAlloc: from this rounded size on, a request gets a segment of its own size."""
ROUND_LARGE: Final = 2 << 20
"""kRoundLarge: such a segment is a multiple of this."""
UNLIMITED: Final = 1 << 62
"""The value of an unset limit: size_t's maximum."""
TOO_LARGE: Final = 1 << 60
"""kExabyte: a request this large is refused before anything is tried."""
