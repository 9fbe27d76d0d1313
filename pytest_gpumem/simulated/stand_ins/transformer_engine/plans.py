"""How many bytes the norms' kernels need beside their outputs: ``getWorkspaceShape()``.

Source: transformer_engine/common/normalization of 2.8: common.h (LaunchParams, KernelRegistry's
``getKernel``), layernorm/ln_fwd_cuda_kernel.cu, ln_bwd_semi_cuda_kernel.cu,
rmsnorm/rmsnorm_fwd_cuda_kernel.cu and rmsnorm_bwd_semi_cuda_kernel.cu (their
``REGISTER_NORM_LAUNCHER`` lines for float16 and bfloat16, which have the same shapes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """One registered kernel."""

    ctas_per_row: int
    warps_m: int
    warps_n: int


_WIDE = Launch(1, 4, 1)
_NARROW = Launch(1, 1, 4)

_TUNED: Mapping[tuple[str, bool], Mapping[int, Launch]] = {
    ("LayerNorm", False): {
        **dict.fromkeys((768, 1024, 1536, 2048, 2304), _WIDE),
        **dict.fromkeys((3072, 3840, 4096, 5120, 6144, 8192, 10240), _NARROW),
        **dict.fromkeys((12288, 12800, 15360, 16384, 18432, 20480, 24576, 25600), Launch(2, 1, 4)),
        **dict.fromkeys((30720, 32768, 40960, 49152), Launch(4, 1, 4)),
        65536: Launch(8, 1, 4),
    },
    ("LayerNorm", True): {
        **dict.fromkeys((768, 1024), _WIDE),
        **dict.fromkeys((1536, 2048, 2304, 3072, 3840, 4096, 5120), _NARROW),
        6144: Launch(1, 1, 8),
        **dict.fromkeys((8192, 10240), Launch(2, 1, 4)),
        **dict.fromkeys((12288, 15360, 16384, 18432, 20480), Launch(4, 1, 4)),
        **dict.fromkeys((12800, 25600), Launch(5, 1, 4)),
        **dict.fromkeys((24576, 30720, 32768, 40960), Launch(4, 1, 8)),
        **dict.fromkeys((49152, 65536), Launch(8, 1, 8)),
    },
    ("RMSNorm", False): {
        **dict.fromkeys((512, 768, 1024, 2048), _WIDE),
        **dict.fromkeys((4096, 8192), _NARROW),
    },
    ("RMSNorm", True): {
        **dict.fromkeys((512, 768, 1024), _WIDE),
        **dict.fromkeys((2048, 4096, 8192), _NARROW),
    },
}
"""By norm and whether it is the backward pass: kernels for one number of columns each."""

_GENERAL: Mapping[bool, Mapping[int, Launch]] = {
    False: {**dict.fromkeys((128, 512, 1024, 2048), _WIDE), 8192: _NARROW},
    True: {**dict.fromkeys((128, 512, 1024), _WIDE), **dict.fromkeys((2048, 4096), _NARROW)},
}
"""Kernels for at most so many columns, or more by several blocks for each row."""

_REGISTERS = 65536
"""Of each multiprocessor, of every GPU since Kepler."""
_REGISTERS_PER_THREAD = 256
"""The most that ``__launch_bounds__`` lets the compiler give a thread, as they are allocated."""
_ALIGNMENT = 16


class Workspace(NamedTuple):
    """Bytes of one call's workspace."""

    nbytes: int
    is_estimate: bool
    """Whether how many blocks a multiprocessor takes, which only the compiler knows, matters."""


def workspace(norm: str, *, backward: bool, rows: int, columns: int, processors: int) -> Workspace:
    """Return what the kernel for ``rows`` rows of ``columns`` elements of 2 or 4 bytes needs.

    Where the number of blocks that a multiprocessor takes matters, as many are assumed as fit
    with all registers that the compiler may use: there may be more.
    """
    tuned = _TUNED[norm, backward].get(columns) if rows % 4 == 0 else None
    if tuned is not None:
        launch = tuned
        per_column = processors * _blocks(launch) // launch.ctas_per_row
        is_estimate = True
    else:
        largest = _GENERAL[backward]
        size = next((size for size in largest if size >= columns), max(largest))
        launch = largest[size]._replace(ctas_per_row=-(-columns // size))
        needed = -(-rows // launch.warps_m)
        room = processors * _blocks(launch) // launch.ctas_per_row
        per_column = min(needed, room)
        is_estimate = needed > room
    nbytes = 0
    if launch.ctas_per_row > 1:
        # Barriers of 4 bytes; sums of 4 bytes in the general forward pass, pairs of them elsewhere.
        each = 4 if tuned is None and not backward else 8
        nbytes += _aligned(2 * per_column * 4)
        nbytes += _aligned(per_column * launch.warps_m * launch.ctas_per_row * each * 2)
    if backward:
        parts = 2 if norm == "LayerNorm" else 1
        nbytes += parts * _aligned(per_column * columns * 4)
    return Workspace(nbytes, is_estimate and nbytes > 0)


def _blocks(launch: Launch) -> int:
    threads = 32 * launch.warps_m * launch.warps_n
    return max(_REGISTERS // (_REGISTERS_PER_THREAD * threads), 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


_WARPS_PER_TILE = 8
_WARPS_PER_PROCESSOR = 16
_CACHE_LINE = 128
_SIZES = (
    (8, 8), (4, 8), (8, 4), (4, 4), (2, 8), (8, 2), (2, 4), (4, 2), (2, 2),
    (1, 8), (8, 1), (1, 4), (4, 1), (1, 2), (2, 1), (1, 1),
)  # fmt: skip
"""Bytes of a load and of a store to the transpose, in the order they are tried."""


def bias_workspace(rows: int, columns: int, itemsize: int, processors: int) -> int:
    """Return the bytes of partial sums of a bias' gradient, while its rows are cast to fp8.

    Source: common/transpose/cast_transpose_fusion.cu of 2.8 (KernelConfig, cast_transpose_fused,
    populate_cast_transpose_dbias_workspace_config), compiled at run time where shapes allow it.
    """
    store = 8
    if rows % 32 == 0 and columns % 32 == 0:
        valid = [
            (load, store)
            for load, store in _SIZES
            if load % itemsize == 0
            and columns % (load * 32 // itemsize) == 0
            and rows % (store * 32) == 0
        ]
        best = valid[0]
        for each in valid[1:]:
            if _is_cheaper(each, best, rows, columns, itemsize, processors):
                best = each
        store = best[1]
    return -(-rows // (store * 32)) * columns * 4


def _is_cheaper(
    one: tuple[int, int],
    other: tuple[int, int],
    rows: int,
    columns: int,
    itemsize: int,
    processors: int,
) -> bool:
    """KernelConfig::operator<, in its integers."""
    first, second = (_rates(*each, rows, columns, itemsize, processors) for each in (one, other))
    scale = math.prod(first) * math.prod(second)
    costs = [sum(scale // rate for rate in rates[:3]) // rates[3] for rates in (first, second)]
    return costs[0] < costs[1]


def _rates(
    load: int, store: int, rows: int, columns: int, itemsize: int, processors: int
) -> tuple[int, int, int, int]:
    """Elements of each load, cast and transposed store, and processors at work."""
    width, height = load * 32 // itemsize, store * 32
    blocks = (columns // width) * (rows // height)
    active = min(-(-blocks * _WARPS_PER_TILE // _WARPS_PER_PROCESSOR), processors)
    return (
        min(_CACHE_LINE, width * itemsize) // itemsize,
        min(_CACHE_LINE, width),
        min(_CACHE_LINE, height),
        active,
    )
