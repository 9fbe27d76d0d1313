from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from pytest_gpumem.sizes import (
    Size,
    Tolerance,
    format_apart,
    format_exact,
    format_size,
    is_decimal,
    parse_size,
    parse_tolerance,
    written_size,
)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("512B", 512),
        ("2K", 2_048),
        ("2M", 2_097_152),
        ("2G", 2_147_483_648),
        ("2T", 2_199_023_255_552),
        ("3KiB", 3_072),
        ("3MiB", 3_145_728),
        ("3GiB", 3_221_225_472),
        ("3TiB", 3_298_534_883_328),
        ("2KB", 2_000),
        ("2MB", 2_000_000),
        ("2GB", 2_000_000_000),
        ("2TB", 2_000_000_000_000),
        ("1.5 MiB", 1_572_864),
        ("  2 gb ", 2_000_000_000),
        ("0.1GB", 100_000_000),
        ("39.39 GiB", 42_294_690_447),
    ],
)
def test_a_size_is_parsed_to_bytes(written: int | str, size: int) -> None:
    assert parse_size(written) == size


def test_a_fraction_of_a_byte_is_rounded_down() -> None:
    assert parse_size("1.9999B") == 1
    assert parse_size("0.0011KB") == 1


def test_large_sizes_are_exact() -> None:
    # As a float, 9007199254740993 would become ...992.
    assert parse_size("9007199254740993") == 9_007_199_254_740_993
    assert parse_size("9007199.254740993GB") == 9_007_199_254_740_993


@pytest.mark.parametrize(
    "junk",
    [
        *(-1, "-1", "-1MiB", True, 1.5, float("nan"), None),
        *("", "GiB", "NaN", "1e9", "1,5 GB", "2 GiBi", "2 x", "0x10", "1..5M", ".", "1 2"),
        *("٣MiB", "2Gi", 1 << 128),
    ],
)
def test_other_values_are_refused_as_sizes(junk: object) -> None:
    with pytest.raises(ValueError) as error:
        parse_size(junk)  # type: ignore[arg-type]  # what users pass is not type-checked
    sentence = str(error.value)
    assert sentence.startswith(f"{junk!r} is not a size; write ")
    assert "2GB" in sentence
    assert "\n" not in sentence


def test_an_error_quotes_a_bounded_part_of_the_value() -> None:
    junk: Any
    for junk in ("9" * 10**6, "\0" * 10**6, 10**5000, [0] * 10**5):
        for parse in (parse_size, parse_tolerance):
            with pytest.raises(ValueError) as error:
                parse(junk)
            assert len(str(error.value)) < 600
            assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1_023, "1023 B"),
        (1_024, "1.0 KiB"),
        (257_024, "251.0 KiB"),
        (432_013_312, "412.0 MiB"),
        (1_739_461_632, "1.62 GiB"),
        (42_294_690_447, "39.39 GiB"),
        (1_099_511_627_776, "1.00 TiB"),
        (5_000 * 1024**4, "5000.00 TiB"),
        (-512, "-512 B"),
        (-29_360_128, "-28.0 MiB"),
    ],
)
def test_a_size_is_formatted_readably(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_size_that_rounds_up_to_the_next_unit_is_shown_in_it() -> None:
    assert format_size(1024**2 - 1) == "1.0 MiB"
    assert format_size(1024**3 - 1) == "1.00 GiB"
    assert format_size(int(1023.9 * 1024**2)) == "1023.9 MiB"


def test_an_exact_size_shows_unit_and_bytes() -> None:
    assert format_exact(1_739_461_632) == "1.62 GiB (1,739,461,632 B)"
    assert format_exact(-1_024) == "-1.0 KiB (-1,024 B)"
    assert format_exact(512) == "512 B"


@pytest.mark.parametrize(
    ("written", "tolerance"),
    [
        ("2% + 1MiB", Tolerance(2.0, 1_048_576)),
        ("1MiB+2%", Tolerance(2.0, 1_048_576)),
        ("1MiB", Tolerance(0.0, 1_048_576)),
        ("1%", Tolerance(1.0, 0)),
        ("0.5 %", Tolerance(0.5, 0)),
        ("0", Tolerance(0.0, 0)),
        (0, Tolerance(0.0, 0)),
        (4096, Tolerance(0.0, 4_096)),
    ],
)
def test_a_tolerance_is_parsed(written: int | str, tolerance: Tolerance) -> None:
    assert parse_tolerance(written) == tolerance


@pytest.mark.parametrize(
    "junk",
    [
        *("", "%", "1% + 2%", "1% + 1%", "1MiB + 1MiB", "1% + 1MiB + 1", "-1%", "1% - 1MiB"),
        *("x%", "nan%", "1% +", 0.01, True, -5, None),
    ],
)
def test_other_values_are_refused_as_tolerances(junk: object) -> None:
    with pytest.raises(ValueError) as error:
        parse_tolerance(junk)  # type: ignore[arg-type]  # what users pass is not type-checked
    assert str(error.value) == (
        f'{junk!r} is not a tolerance; write "2% + 1MiB", "1%", "1MiB" or bytes as an int'
    )


@pytest.mark.parametrize(
    ("percent", "floor"), [(-1.0, 0), (float("nan"), 0), (float("inf"), 0), (1.0, -1)]
)
def test_parts_of_a_tolerance_are_finite_and_not_negative(percent: float, floor: int) -> None:
    with pytest.raises(ValueError, match="is not a tolerance"):
        Tolerance(percent, floor)


def test_the_allowance_is_the_percentage_plus_the_floor() -> None:
    assert Tolerance(2.0, 1_048_576).allowance(100_000_000) == 2_000_000 + 1_048_576
    assert Tolerance(0.0, 4_096).allowance(100_000_000) == 4_096
    assert Tolerance(1.0, 1).allowance(199) == 2


def test_a_bare_percentage_allows_one_allocator_block() -> None:
    assert Tolerance(1.0, 0).allowance(10_000) == 512
    assert Tolerance(1.0, 0).allowance(51_200) == 512
    assert Tolerance(1.0, 0).allowance(51_300) == 513
    assert Tolerance(0.0, 0).allowance(10_000) == 0


def test_the_allowance_is_exact() -> None:
    # 0.29 / 100 * 1_000_000 is 2899.9999999999995 in floating point.
    assert Tolerance(0.29, 1).allowance(1_000_000) == 2_901
    # 80 TiB and one byte: a float cannot represent them together with the percentage.
    assert Tolerance(100.0, 1).allowance(2**60 + 1) == 2**60 + 2
    assert Tolerance(1e-05, 1).allowance(10_000_000) == 2


@pytest.mark.parametrize(
    ("tolerance", "text"),
    [
        (Tolerance(1.0, 1_048_576), "1% + 1MiB"),
        (Tolerance(0.5, 1_000), "0.5% + 1KB"),
        (Tolerance(10.0, 0), "10%"),
        (Tolerance(0.0, 513), "513B"),
        (Tolerance(1e-05, 0), "0.00001%"),
        (Tolerance(0.0, 0), "0"),
    ],
)
def test_a_tolerance_is_formatted_as_it_was_written(tolerance: Tolerance, text: str) -> None:
    assert str(tolerance) == text
    assert parse_tolerance(text) == tolerance


def test_two_different_sizes_are_formatted_differently() -> None:
    assert format_apart(20 * 1024**2 + 4096, 20 * 1024**2) == ("20.004 MiB", "20.000 MiB")
    assert format_apart(40 * 1024**3, 1024) == ("40.00 GiB", "1.0 KiB")
    assert format_apart(2**40 + 512, 2**40) == ("1,099,511,628,288 B", "1,099,511,627,776 B")
    assert format_apart(4096, 4096) == ("4.0 KiB", "4.0 KiB")


def test_a_written_size_equals_its_bytes_and_keeps_its_text() -> None:
    written = written_size(" 300 KB ")
    assert (written, Size(written, "").written) == (300_000, "")
    assert getattr(written, "written", None) == "300 KB"
    assert type(written_size("512")) is int
    assert [is_decimal(text) for text in ("300 KB", "2gb", "2G", "2GiB", "512")] == [
        *(True, True),
        *(False, False, False),
    ]


def test_a_copy_of_a_size_keeps_its_written_text() -> None:
    size = written_size("300KB")
    for again in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert isinstance(again, Size)
        assert (again, again.written) == (300_000, "300KB")
