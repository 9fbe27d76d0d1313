"""Temporary storage of CUB's algorithms, as compiled CUB returns it for some GPUs."""

from __future__ import annotations

import pytest

from pytest_gpumem.simulated.operators import cub

TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)
CUDA_12, CUDA_13 = (2, 8), (2, 11)


@pytest.mark.parametrize(
    ("count", "key", "value", "bits", "answers"),
    [
        pytest.param(4864, 8, 8, 14, (84_479, 84_479, 84_479), id="int64"),
        pytest.param(1_234_567, 8, 8, 64, (20_219_903, 20_100_095, 20_044_799), id="all bits"),
        pytest.param(
            300_000_000, 8, 8, 64, (4_897_646_079, 4_871_615_999, 4_859_685_375), id="portions"
        ),
        pytest.param(100_000, 4, 8, 32, (1_245_695, 1_242_623, 1_228_287), id="float"),
        pytest.param(4000, 4, 8, 32, (58_879, 58_879, 57_855), id="few floats"),
        pytest.param(100_000, 4, 4, 24, (816_127, 823_295, 823_295), id="int32"),
        pytest.param(100_000, 8, 4, 64, (1_253_887, 1_244_671, 1_235_455), id="int64 and int32"),
        pytest.param(100_000, 8, 0, 5, (39_423, 30_207, 20_991), id="keys alone, one pass"),
        pytest.param(100_000, 8, 0, 20, (843_519, 834_303, 825_087), id="keys alone"),
    ],
)
def test_radix_sort(count: int, key: int, value: int, bits: int, answers: tuple[int, ...]) -> None:
    assert answers == tuple(
        cub.radix_sort_pairs_bytes(count, key, value, bits, gpu) for gpu in (TURING, AMPERE, HOPPER)
    )


def test_one_block_sorts_up_to_its_capacity() -> None:
    # 256 threads of 9 pairs each. index_put_ on the dry device: 12 bits of the largest index.
    assert cub.radix_sort_pairs_bytes(2304, 8, 8, 12, AMPERE) == 1
    assert cub.radix_sort_pairs_bytes(2305, 8, 8, 12, AMPERE) == 43_007


@pytest.mark.parametrize(
    ("count", "key", "answer"), [(100_000, 2, 1_023_231), (100_000, 1, 32_255), (7000, 2, 76_799)]
)
def test_small_keys_on_hopper(count: int, key: int, answer: int) -> None:
    assert cub.radix_sort_pairs_bytes(count, key, 8, 8 * key, HOPPER) == answer


def test_small_keys_before_hopper_take_a_table_per_block() -> None:
    # One block per SM, as its 255 registers per thread allow, in five waves of 128 digits.
    table = (5 * 108 * 128 + 512 * 11) * 8
    answer = cub.radix_sort_pairs_bytes(100_000, 2, 8, 16, AMPERE, sms=108)
    assert answer == cub.alias_temporaries(table, 200_000, 800_000)


def test_segments_are_sorted_through_a_copy() -> None:
    assert cub.segmented_sort_pairs_bytes(100_000, 4, 8) == 1_200_383


@pytest.mark.parametrize(
    ("count", "element", "version", "answer"),
    [
        (1000, 4, CUDA_13, 1023),
        (1_000_000, 4, CUDA_12, 4863),
        (1_000_000, 4, CUDA_13, 5119),
        (1_000_000, 8, CUDA_12, 18_687),
        (1_000_000, 8, CUDA_13, 18_943),
        # Of c10::Half, as torch's own code asks on the dry device (2.6, 2.13 and 2.15).
        (1_000, 2, CUDA_12, 1279),
        (1_000_000, 2, CUDA_12, 3327),
        (1_000_000, 2, CUDA_13, 3327),
    ],
)
def test_prefix_sum(count: int, element: int, version: tuple[int, int], answer: int) -> None:
    assert cub.scan_bytes(count, element, version) == answer


@pytest.mark.parametrize(
    ("count", "element", "answer"),
    [(1000, 8, 1791), (3_000_000, 8, 68_351), (1000, 16, 2303), (3_000_000, 16, 283_391)],
)
def test_prefix_sum_of_complex_numbers(count: int, element: int, answer: int) -> None:
    # As torch's own code asks on the dry device (2.15), in tiles of 128 threads.
    assert cub.scan_bytes(count, element, CUDA_13, is_complex=True) == answer


@pytest.mark.parametrize(
    ("count", "index", "answers"),
    [
        (3000, 8, (1023, 1023, 1023)),
        (100_000, 8, (5887, 1791, 1279)),
        (1_000_000, 8, (50_943, 9727, 4351)),
        (1_000_000, 4, (23_551, 6655, 3071)),
    ],
)
def test_runs_of_equal_keys(count: int, index: int, answers: tuple[int, ...]) -> None:
    assert answers == tuple(
        cub.unique_by_key_bytes(count, index, gpu, CUDA_12) for gpu in (TURING, AMPERE, HOPPER)
    )
    # As torch's own code asks of the dry device: 2.6 takes states of half the size.
    assert cub.unique_by_key_bytes(1_000_000, 8, AMPERE, CUDA_13) == 13_055
    assert cub.unique_by_key_bytes(1_000_000, 8, HOPPER, CUDA_13) == 4351
    old = [cub.unique_by_key_bytes(1_000_000, index, AMPERE, (2, 6)) for index in (8, 4)]
    assert old == [5119, 3583]


@pytest.mark.parametrize(
    ("capability", "count"), [(TURING, 10_240), (AMPERE, 43_008), (HOPPER, 157_696)]
)
def test_thrusts_runs_of_equal_keys(capability: tuple[int, int], count: int) -> None:
    # As torch's own code asks of the dry device: a tile more is one of 32 that share 256 bytes.
    counts = (2, count, count + 1, 2 * count + 1)
    answers = [cub.thrust_unique_by_key_bytes(one, capability, CUDA_13) for one in counts]
    assert answers == [1535, 1535, 1791, 2047]


def test_sums_by_key() -> None:
    assert cub.sum_by_key_bytes(32, 4, AMPERE) == 1279
    answers = [cub.sum_by_key_bytes(100_000, 4, gpu) for gpu in (TURING, AMPERE, HOPPER)]
    assert answers == [1791, 1535, 1535]
    assert cub.sum_by_key_bytes(100_000, 8, AMPERE) == 2047


def test_selections() -> None:
    # 1,578 flags: recorded in Constructor-Sun/code_location, torch 2.8.
    assert cub.flagged_bytes(1578, AMPERE, CUDA_12) == 767
    flagged = [cub.flagged_bytes(10**9, gpu, CUDA_12) for gpu in (TURING, AMPERE, HOPPER)]
    assert flagged == [12_500_735, 3_472_895, 1_894_655]
    assert cub.flagged_bytes(10**9, (10, 0), CUDA_13) == 2_273_535
    unique = [cub.unique_bytes(10**9, gpu, CUDA_13) for gpu in (TURING, AMPERE, HOPPER)]
    assert unique == [12_500_991, 4_167_679, 1_894_911]


def test_counts() -> None:
    assert cub.device_sum_bytes(1578, 108, 2048) == 1
    assert cub.device_sum_bytes(1_000_000, 108, 2048) == 17_663
