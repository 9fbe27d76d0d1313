"""A simulated GPU's facts that differ between releases of PyTorch, each with its source.

A constant is the first release with that behaviour. Those of the allocator stand in
``allocator/releases.py``, and those of one operator with its rule.
"""

from __future__ import annotations

from typing import Final

from pytest_gpumem.allocator.releases import Version

# Workspaces: aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp.
LARGE_MAJORS: Final[tuple[tuple[Version, frozenset[int]], ...]] = (
    ((2, 14), frozenset({9, 10, 11, 12})),
    ((2, 12), frozenset({9, 10, 12})),
)
"""First release, and the majors of compute capability whose default workspace is the large one."""
STATIC_SIZE: Final[Version] = (2, 13)
"""Sizes are read once, and functions set them."""
LT_READ_EVERY_TIME: Final[Version] = (2, 8)
"""Lt's size is read every time, until :data:`STATIC_SIZE`."""
LT_KEPT: Final[Version] = (2, 9)
"""Lt keeps a block of its own."""
LT_MAY_SHARE: Final[Version] = (2, 8)
"""``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` lets Lt compute in cuBLAS's workspace."""
LT_SHARES: Final[Version] = (2, 12)
"""Lt shares by default, and takes its handle without cuBLAS's workspace."""
UNSET_IS_UNIFIED: Final[Version] = (2, 11)
"""Only this release treats the unset variable as 1 where it limits the size."""
WORKSPACE_PER_OPERATION: Final[Version] = (2, 15)
"""Every operation takes a workspace and returns it, unless ``TORCH_CUBLAS_WORKSPACE_CACHE``."""

# CUDA graphs: aten/src/ATen/cuda/CUDAGraph.cpp and CUDAGeneratorImpl.cpp.
CLEARS_WORKSPACES: Final[Version] = (2, 12)
"""Resetting a graph frees the cuBLAS workspaces of its stream."""
RNG_PER_CAPTURE: Final[Version] = (2, 12)
"""Each capture has a seed and an offset in memory, on the default stream."""
LAZY_RNG: Final[Version] = (2, 14)
"""A capture allocates them at its first random operator."""
PINNED_ALONE: Final[Version] = (2, 11)
"""A capture refuses copies between the GPU and memory that is not pinned (PyTorch #172156,
copy_kernel_cuda of aten/src/ATen/native/cuda/Copy.cu; 2.10 does not have its message)."""

# Memory pools: torch/cuda/memory.py.
THREAD_POOLS: Final[Version] = (2, 8)
"""``use_mem_pool`` routes only the thread that opened it."""
OPTIONS_SINCE: Final[dict[str, Version]] = {"use_on_oom": (2, 8), "no_split": (2, 10)}
"""By option of ``MemPool``."""

# Libraries.
_CUDNN: Final[tuple[tuple[Version, int], ...]] = (
    ((2, 15), 92600),
    ((2, 14), 92400),
    ((2, 12), 92000),
    ((2, 11), 91900),
    ((2, 8), 91002),
    ((2, 7), 90501),
    ((0, 0), 90100),
)
"""First release, and cuDNN of its CUDA wheel on PyPI as ``cudnnGetVersion`` gives it (the wheels'
metadata: CUDA 12.4, 12.6, 12.8, and 13 since 2.11)."""
COPIES_ALONE: Final[Version] = (2, 11)
"""Until :data:`NCCL2`, the only rank of a group copies what it would reduce and scatter, without a
reduction's factor (``reduce_scatter``, ``_reduce_scatter_base`` of ProcessGroupNCCL.cpp)."""
NCCL2: Final[Version] = (2, 15)
"""NCCL's group is ``ProcessGroupNCCL2``. It sends and receives lists of tensors part by part, and
keeps the number that its barriers reduce (``barrier_buffer_`` of
torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp)."""


def cudnn_of(version: Version) -> int:
    """Return the version of cuDNN that is released with this version of torch."""
    return next(number for since, number in _CUDNN if version >= since)
