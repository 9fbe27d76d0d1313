"""Temporary storage of CUB's device-wide algorithms, in bytes.

Source: cub/device/dispatch/dispatch_radix_sort.cuh (DispatchRadixSort::Invoke, InvokeOnesweep),
dispatch/tuning/tuning_radix_sort.cuh (Policy700, 800, 900), util_device.cuh (AliasTemporaries) of
CUDA 12 and 13; aten/src/ATen/cuda/cub.cuh passes 64-bit counts.
"""

from __future__ import annotations

_DIGITS = 256
"""Radix digits of one pass: eight bits."""
_LARGEST_PORTION = (1 << 28) - 1


def radix_sort_pairs_bytes(
    count: int, key_bytes: int, value_bytes: int, bits: int, capability: tuple[int, int]
) -> int:
    """Temporary storage of sorting ``count`` pairs by the lowest ``bits`` bits of their keys."""
    if count <= _tile(256, 19, key_bytes, value_bytes):
        return 1  # One block sorts them; a null pointer would ask for the size again.
    tile = _onesweep_tile(key_bytes, value_bytes, capability)
    portion = _LARGEST_PORTION // tile * tile
    passes = -(-bits // 8)
    portions = -(-count // portion)
    blocks = -(-min(count, portion) // tile)
    spare = passes > 1
    return alias_temporaries(
        portions * passes * _DIGITS * 8,
        blocks * _DIGITS * 4,
        count * key_bytes if spare else 0,
        count * value_bytes if spare else 0,
        portions * passes * 4,
    )


def alias_temporaries(*sizes: int) -> int:
    """One allocation that holds all ``sizes``, each aligned to 256 bytes."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def bits_of(largest: int) -> int:
    """Bits that hold keys up to ``largest``; at::cuda::cub::get_num_bits."""
    return max(largest.bit_length(), 1)


def _tile(threads: int, items: int, key_bytes: int, value_bytes: int) -> int:
    # RegBoundScaling: the items of a policy are for four-byte types.
    return threads * max(1, items * 4 // max(4, key_bytes, value_bytes))


def _onesweep_tile(key_bytes: int, value_bytes: int, capability: tuple[int, int]) -> int:
    if capability >= (9, 0):
        items = (30 if value_bytes < 8 else 24) if key_bytes == 8 else 29
        return _tile(384, items, key_bytes, value_bytes)
    if capability >= (8, 0):
        return _tile(384, 17 if key_bytes == 4 else 21, key_bytes, value_bytes)
    return _tile(256, 46 if key_bytes == value_bytes == 4 else 23, key_bytes, value_bytes)
