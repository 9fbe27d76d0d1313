"""Workspaces of cuSOLVER in bytes, where a formula repeats what was recorded.

Source: the blocks that operators of torch 2.11.0+cu130 took on an H100, of 1 to 1024 rows in
float32, float64 and complex64. Unknown are those of other GPUs, of CUDA 12, of routines that are
not here and of sizes outside of what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.simulated.operators.layout import round_up

Capability = tuple[int, int]

_CAPABILITY = (9, 0)
_TILE = 32
"""Rows of a tile; elements to which sizes are rounded."""


def workspace_bytes(
    routine: str, capability: Capability, rows: int, columns: int, size: int
) -> int | None:
    """Return the workspace of ``routine`` of CUDA 13 for a matrix; ``None`` where it is unknown.

    ``size`` are bytes of an element.
    """
    return _SIZES[routine](rows, columns, size) if capability == _CAPABILITY else None


def _reflectors(columns: int) -> int:
    return 512 * (1024 + 2 * max(columns, 256))


def _orgqr(rows: int, columns: int, size: int) -> int | None:
    if columns <= 64:
        return (2 * 128 * 128 + 256 + round_up(rows * columns, _TILE)) * size
    if columns < 128 or rows > 1024:
        return None
    return (128 * (rows + 2 * columns + 128) + 256) * size


def _gesvdj(rows: int, columns: int, size: int) -> int | None:
    """Return the workspace; a matrix that is not square is reflected first."""
    least = min(rows, columns)
    if rows == columns or max(rows, columns) > 512:
        return None
    turned = round_up(rows * columns, _TILE) if rows < columns else 0
    return (_reflectors(least) + 32 + round_up(least, _TILE) + turned) * size


_SIZES: dict[str, Callable[[int, int, int], int | None]] = {
    "potrf": lambda rows, columns, size: (
        128 + round_up(4 * (-(-rows // _TILE)) ** 2, _TILE) if rows <= 512 else None
    ),
    "getrf": lambda rows, columns, size: (
        256 + 16 * round_up(rows, _TILE) if rows == columns <= 512 else None
    ),
    "geqrf": lambda rows, columns, size: (
        _reflectors(columns) * size + 128 if rows <= 1024 and columns <= 512 else None
    ),
    "orgqr": _orgqr,
    "sytrf": lambda rows, columns, size: (
        max(98_432, 64 * (rows + 1) * size) if size == 4 or rows >= 512 else None
    ),
    "gesvdj": _gesvdj,
    "gesvdjBatched": lambda rows, columns, size: 992 * size,
}
ROUTINES = tuple(_SIZES)
"""``enum routine`` of ``dry/source/cusolver.c``."""
