"""Temporary storage of CUB's device-wide algorithms, in bytes.

Source: cub/device/dispatch (dispatch_radix_sort.cuh, dispatch_scan.cuh, dispatch_scan_by_key.cuh,
dispatch_unique_by_key.cuh and their tuning policies), agent/single_pass_scan_operators.cuh
(AllocationSize), util_device.cuh (AliasTemporaries) of CUDA 12.8, 13.0 and 13.2, whose compiled
answers these formulas repeat; aten/src/ATen/cuda/cub.cuh passes 64-bit counts to sorts. torch's
wheels are built with CUDA 12.4 (2.6), 12.6 (2.7), 12.8 (2.8 to 2.10), 13.0 (2.11 to 2.14) and 13.2.
"""

from __future__ import annotations

Capability = tuple[int, int]
Version = tuple[int, int]

_DIGITS = 256
"""Radix digits of one pass: eight bits."""
_LARGEST_PORTION = (1 << 28) - 1
LARGEST_SCAN = 1 << 30
"""Elements that at::cuda::cub scans at once."""
_NESTED_SINCE: Version = (2, 11)
"""CUB 3 (CUDA 13) aligns the tile states once more by themselves."""
_WIDE_RUNS_SINCE: Version = (2, 7)
"""Runs of equal keys are counted in 64 bits."""
_LANES = 32
"""Tile states in front of the first tile."""


def radix_sort_pairs_bytes(
    count: int, key_bytes: int, value_bytes: int, bits: int, capability: Capability, sms: int = 0
) -> int:
    """Return the bytes for sorting ``count`` pairs by the lowest ``bits`` bits of their keys.

    ``value_bytes`` is 0 for keys only. Keys of less than four bytes take a table per block before
    compute capability 9.0, so their sort depends on ``sms``.
    """
    if count <= _tile(256, 19, key_bytes, value_bytes):
        return 1  # One block sorts them; a null pointer would query the size again.
    if key_bytes < 4 and capability < (9, 0):
        # Digit counts of five waves of blocks, and of one block that adds them up.
        blocks, digits = _SPINES[key_bytes]
        spine = (5 * blocks * sms * digits + _SCAN_TILE) * 8
        return alias_temporaries(spine, count * key_bytes, count * value_bytes)
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


def segmented_sort_pairs_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Return the bytes for sorting ``count`` pairs in segments, by all bits of their keys."""
    return alias_temporaries(count * key_bytes, count * value_bytes)


def scan_bytes(
    count: int, element_bytes: int, version: Version, *, is_complex: bool = False
) -> int:
    """Return the bytes for a prefix sum of ``count`` numbers, by an operator that is not CUB's."""
    items = max(1, min(15 * 4 // element_bytes, 30))
    if element_bytes < 4 or is_complex:
        # c10's types are no numbers to CUB: flags and both sums are kept apart.
        states = -(-count // (128 * items)) + _LANES
        apart = alias_temporaries(states * 4, states * element_bytes, states * element_bytes)
        return alias_temporaries(apart)
    # A state of a number and a flag is one word.
    return _tile_states(count, 128 * items, 2 * element_bytes, version)


def unique_by_key_bytes(
    count: int, index_bytes: int, capability: Capability, version: Version
) -> int:
    """Return the bytes for finding where runs of equal keys begin among ``count`` keys."""
    tile = _unique_by_key_tile(index_bytes, capability, version)
    return _tile_states(count, tile, 16 if version >= _WIDE_RUNS_SINCE else 8, version)


def thrust_unique_by_key_bytes(count: int, capability: Capability, version: Version) -> int:
    """Return what Thrust takes for the same, of 64-bit indices.

    It counts in 32 bits, and how many it has found stands behind the states of the tiles
    (thrust/system/cuda/detail/unique_by_key.h).
    """
    tile = _unique_by_key_tile(8, capability, version)
    return alias_temporaries(_tile_states(count, tile, 8, version), 8)


def _unique_by_key_tile(index_bytes: int, capability: Capability, version: Version) -> int:
    tile = 64 * max(1, 11 * 4 // index_bytes)
    is_nested = version >= _NESTED_SINCE
    if capability >= (9, 0):
        tile = 512 * 14 if index_bytes == 4 else 448 * (11 if is_nested else 10)
    elif capability == (8, 0):
        tile = 256 * 11 if index_bytes == 4 else 192 * 7 if is_nested else 256 * 7
    return tile


def unique_bytes(count: int, capability: Capability, version: Version) -> int:
    """Return the bytes for keeping the first of equal neighbours among ``count`` indices."""
    tile = 384 * 11 if capability >= (9, 0) else 320 * 6 if capability == (8, 0) else 64 * 10
    return _tile_states(count, tile, 8, version)


def flagged_bytes(count: int, capability: Capability, version: Version) -> int:
    """Return the bytes for keeping those of ``count`` 64-bit numbers that a flag selects."""
    tile = 64 * 10
    if capability[0] >= 10 and version >= _NESTED_SINCE:
        tile = 320 * 11
    elif capability >= (9, 0):
        tile = 384 * 11
    elif capability == (8, 0):
        tile = 256 * 9
    return _tile_states(count, tile, 8, version)


def device_sum_bytes(count: int, sms: int, threads_per_sm: int) -> int:
    """Return the bytes for adding ``count`` 32-bit numbers up."""
    if count <= 256 * 16:
        return 1
    # One partial sum for each block of five waves; its 256 threads are all that limits them.
    return alias_temporaries(5 * sms * (threads_per_sm // 256) * 4)


def sum_by_key_bytes(count: int, number_bytes: int, capability: Capability) -> int:
    """Return the bytes for ``count`` prefix sums by keys of the same size."""
    tile = 256 * 9
    if number_bytes == 4:
        if capability[0] >= 10:
            tile = 224 * 20
        elif capability >= (9, 0):
            tile = 288 * 14
        elif capability == (8, 0):
            tile = 256 * 15
    tiles = -(-count // tile)
    return alias_temporaries((tiles + _LANES) * 16, tiles * number_bytes)


def alias_temporaries(*sizes: int) -> int:
    """Return the bytes of an allocation that holds all ``sizes``, each aligned to 256 bytes."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def bits_of(largest: int) -> int:
    """Return the bits that hold keys up to ``largest`` (at::cuda::cub::get_num_bits)."""
    return max(largest.bit_length(), 1)


def _tile_states(count: int, tile: int, state_bytes: int, version: Version) -> int:
    states = (-(-count // tile) + _LANES) * state_bytes
    if version >= _NESTED_SINCE:
        states = alias_temporaries(states)
    return alias_temporaries(states)


_SCAN_TILE = 512 * 11
_SPINES = {2: (1, 128), 1: (2, 32)}
"""By bytes of a key: blocks per SM (its registers allow no more), radix digits of one pass."""


def _tile(threads: int, items: int, key_bytes: int, value_bytes: int) -> int:
    # RegBoundScaling: the items of a policy are for four-byte types.
    return threads * max(1, items * 4 // max(4, key_bytes, value_bytes))


_SMALL_KEYS = {(1, 8): (384, 18), (2, 8): (512, 23), (1, 0): (512, 19), (2, 0): (512, 19)}
"""Threads and items for keys and values of these bytes since compute capability 9.0."""


def _onesweep_tile(key_bytes: int, value_bytes: int, capability: Capability) -> int:
    if capability >= (9, 0):
        threads, items = 384, 23
        if key_bytes < 4:
            threads, items = _SMALL_KEYS.get((key_bytes, value_bytes), (384, 23))
        elif key_bytes == 8:
            items = 30 if value_bytes < 8 else 24
        else:
            items = 29 if value_bytes == 8 else 17 if value_bytes else 19
        return _tile(threads, items, key_bytes, value_bytes)
    if capability >= (8, 0):
        items = 17 if key_bytes == 4 and value_bytes else 21
        return _tile(384, items, key_bytes, value_bytes)
    return _tile(256, 46 if key_bytes == value_bytes == 4 else 23, key_bytes, value_bytes)
