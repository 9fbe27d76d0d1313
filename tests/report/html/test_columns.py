"""Columns of numbers as a page holds them: few bytes, and every number exact."""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode
from typing import Any

from pytest_gpumem.report.html.recording import Columns

CODES = {1: "B", 2: "H", 4: "I"}


def read(columns: Columns, told: dict[str, Any]) -> list[int]:
    """The column, as tape.js reads it."""
    content = zlib.decompress(b64decode(columns.packed()))
    begin = told["begin"]
    ids = array(CODES[told["width"]])
    ids.frombytes(content[begin : begin + told["count"] * told["width"]])
    if "values" not in told:
        return list(ids)
    values = array("d")
    values.frombytes(content[told["values"] : told["values"] + 8 * told["distinct"]])
    return [int(values[number]) for number in ids]


def test_columns_stand_one_after_the_other_where_a_browser_can_read_them() -> None:
    columns = Columns()
    first = columns.add([512, -512, 512])
    second = columns.add(range(300))
    third = columns.add_small([70_000, 0])
    assert first == {"begin": 0, "count": 3, "width": 1, "values": 8, "distinct": 2}
    assert (second["begin"], second["width"]) == (24, 2)
    assert third == {"begin": 24 + 600 + 2400, "count": 2, "width": 4}
    assert read(columns, first) == [512, -512, 512]
    assert read(columns, second) == list(range(300))
    assert read(columns, third) == [70_000, 0]


def test_more_different_numbers_than_two_bytes_tell() -> None:
    columns = Columns()
    told = columns.add(range(0, 70_000 * 512, 512))
    assert told["width"] == 4
    assert read(columns, told)[-1] == 69_999 * 512


def test_what_a_loop_repeats_is_small() -> None:
    columns = Columns()
    columns.add([512, 1024, -512, 4096, -1024, -4096] * 100_000)
    assert len(columns.packed()) < 2_000


def test_an_empty_column() -> None:
    columns = Columns()
    told = columns.add([])
    assert (told["count"], told["width"], told["distinct"]) == (0, 1, 0)
