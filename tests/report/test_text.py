import io

import pytest
from _pytest._io import TerminalWriter

from pytest_gpumem.text import Line, TextRun, cells, pack, pad, shorten, wrap, write_lines


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("test_step", 9, "test_step"),
        ("test_step", 8, "test…tep"),
        ("test_step", 3, "t…p"),
        ("test_step", 1, "…"),
        ("test_step", 0, ""),
        ("測試測試測試", 12, "測試測試測試"),
        ("測試測試測試", 8, "測試…試"),
    ],
)
def test_a_long_text_loses_its_middle(text: str, width: int, expected: str) -> None:
    assert shorten(text, width) == expected
    assert cells(shorten(text, width)) <= width


def test_a_wide_character_has_two_columns_and_an_accent_none() -> None:
    assert cells("ab") == 2
    assert cells("測試") == 4
    assert cells("e\u0301") == 1


def test_padding_counts_columns_not_characters() -> None:
    assert pad("測", 4) == "測  "
    assert pad("1 B", 5, right=True) == "  1 B"


def test_sentences_wrap_between_words_with_a_hanging_indent() -> None:
    assert wrap("one two three four", 10, first="* ", rest="    ") == [
        "* one two",
        "    three",
        "    four",
    ]
    assert wrap("", 10) == []


def test_a_number_is_not_separated_from_its_unit() -> None:
    assert wrap("peaked at 64.0 MiB (512 B, +5.0 %) of B cells", 14) == [
        "peaked at",
        "64.0 MiB",
        "(512 B,",
        "+5.0 %) of B",
        "cells",
    ]


def test_a_word_that_is_too_long_is_never_broken() -> None:
    assert wrap("see tests/test_model.py::test_step now", 10) == [
        "see",
        "tests/test_model.py::test_step",
        "now",
    ]


def test_items_are_packed_without_being_broken() -> None:
    assert pack(["peak 1 B", "after 2 B", "leaked 0 B"], 20, first="  ", rest="  ") == [
        "  peak 1 B",
        "  after 2 B",
        "  leaked 0 B",
    ]
    assert pack(["peak 1 B", "after 2 B", "leaked 0 B"], 21, first="  ", rest="  ") == [
        "  peak 1 B  after 2 B",
        "  leaked 0 B",
    ]


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        (False, "plain bad\ndim\n"),
        (True, "plain \x1b[1m\x1b[31mbad\x1b[0m\n\x1b[2mdim\x1b[0m\n"),
    ],
)
def test_styles_are_those_of_the_terminal_writer(colour: bool, expected: str) -> None:
    file = io.StringIO()
    writer = TerminalWriter(file)
    writer.hasmarkup = colour
    lines = [Line((TextRun("plain "), TextRun("bad", "bold red"))), Line.of("dim", "dim")]
    write_lines(writer, lines)
    assert file.getvalue() == expected
    assert [line.text for line in lines] == ["plain bad", "dim"]
